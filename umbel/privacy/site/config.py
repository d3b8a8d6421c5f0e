"""A site: a node's knowledge about itself, and its policy.

Everything comes from where the node runs, from its own node configuration and from its environment, where
``min-noise-multiplier`` is ``UMBEL_MIN_NOISE_MULTIPLIER``; the node configuration wins. No code here reads a message: a
server must not be able to tell a site that it is simulated. The site's policy wins over the server's task.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from umbel.privacy.accounting.guarantee import gap
from umbel.privacy.accounting.rows import row_gap
from umbel.privacy.site.charges import Limits
from umbel.privacy.site.policy import AcceptedRelease, Approval, Policy, Role
from umbel.privacy.site.policy_file import POLICY_FILE, policy_of
from umbel.protocol.clients import ClientInDataset, ClientOnNode, counted
from umbel.protocol.errors import Refused, SiteError
from umbel.protocol.home import umbel_home
from umbel.protocol.logs import FORM
from umbel.protocol.plugins import TRUST
from umbel.protocol.project import ENGINE
from umbel.protocol.release import Protect, Release, exact
from umbel.protocol.run_config import MAX_HYPOTHESES, RunConfig
from umbel.protocol.signatures import server_of
from umbel.protocol.simulated import runs_in_simulation

DATA_PATH = "data-path"

# Flower puts these into the node configuration of a simulated node, and may put them into another's.
_PARTITION = ("partition-id", "num-partitions")
_PREFIX = "UMBEL_"
_OURS = re.compile(_PREFIX, re.IGNORECASE).match
SERVER_CA = "UMBEL_SERVER_CA"
"""Environment variable with the file of the certificate authority by which the node knows its server."""
NODE_CONFIG = "UMBEL_NODE_CONFIG"
"""Environment variable with the node's configuration, for an executor that the same command starts: it believes no
other."""
_NO_ENTRIES = ("UMBEL_HOME", TRUST, FORM, ENGINE, SERVER_CA, NODE_CONFIG)

# A simulated node holds no site's data, and allows every request of a run.
_SIMULATED: dict[str, Any] = {
    "role": "split", "min-noise-multiplier": 0.0, "clipping": "any floor=0", "release": "any", "min-clients": 1,
    "max-choice-epsilon": "inf", "budget": "inf", "reports": "exact=true", "max-hypotheses": MAX_HYPOTHESES,
    "max-work": "epochs=inf steps=inf examples=inf", "max-seconds": "inf", "allow-unsanitised": True, "rows": "noise=0",
}  # fmt: skip


@dataclass(frozen=True)
class Site:
    """A node, as far as privacy is concerned.

    Attributes
    ----------
    policy : Policy
        The rules for tasks and releases.
    data_path : Path or None
        The data that this node's configuration names; None in simulation, where the node serves a part of
        the run config's dataset, and for an app that opens its own data.
    first, step : int
        The node hosts the dataset's clients ``first, first + step, ...``: in simulation, and where
        the site's ``place`` says so.
    simulated : bool
        Whether the node holds no data of a site. Where it runs decides, and nothing else.
    """

    policy: Policy
    data_path: Path | None
    first: int = 0
    step: int = 1
    simulated: bool = False

    @classmethod
    def of(cls, node_config: Mapping[str, Any], own_data: bool = True) -> Site:
        """Return the site that a node configuration and the environment describe.

        Parameters
        ----------
        own_data : bool
            Whether a site's configuration names its data. An app that opens its data by itself needs a ledger alone.

        Raises
        ------
        SiteError
            If the node is not simulated and names no data, or an entry is invalid: a typing mistake never
            weakens a policy.
        """
        environment, node_config = Policy.current(_environment()), Policy.current(node_config)
        app_keys = str((environment | dict(node_config)).get("app-keys", "")).split()
        if taken := sorted({*Policy.names()}.intersection(app_keys)):
            text = f"app-keys names {taken[0]}, an entry of umbel; rename the app's entry"
            raise SiteError(text, code="site.app-keys")
        ignored = {*_PARTITION, *app_keys}
        own = {key: value for key, value in node_config.items() if key not in ignored}
        # The site's own path comes first: real nodes may have a partition-id as well.
        simulated = runs_in_simulation()
        if own.get(DATA_PATH) or own.get(POLICY_FILE) or not (own_data or simulated):
            if DATA_PATH in environment:
                raise SiteError(
                    "data-path belongs in each node's configuration; unset UMBEL_DATA_PATH", code="site.variable"
                )
            policy = policy_of(environment | own)
            if own_data and not policy.data_path:
                raise SiteError(f"{policy.policy_file} names no {DATA_PATH}; add it", code="site.no-data")
            if not (policy.data_path or policy.ledger_path):
                text = "this node keeps no ledger: start it with --node-config 'ledger-path=\"/path/to/ledger.jsonl\"'"
                raise SiteError(text, code="site.no-ledger")
            return cls.serving(policy)
        if not simulated:
            raise SiteError(
                f"this node serves no data: start it with --node-config '{DATA_PATH}=\"/path/to/data\"'",
                code="site.no-data",
            )
        # A user's other environment variables are not policy of a simulated node.
        known = {key: environment[key] for key in environment.keys() & {*Policy.names()} - {DATA_PATH, POLICY_FILE}}
        policy = Policy.of(_SIMULATED | known | own)
        return cls(policy, None, int(node_config["partition-id"]), int(node_config["num-partitions"]), True)

    @classmethod
    def serving(cls, policy: Policy) -> Site:
        """Return the site that serves its own data by a policy; raise `SiteError` if the policy is not fit for that."""
        first, _, step = policy.place.partition("/")
        if not (first.isdecimal() and step.isdecimal() and int(first) < int(step)):
            raise SiteError(f'place must be "i/n" with i from 0 to n - 1, got {policy.place!r}', code="site.place")
        site = cls(policy, _path(DATA_PATH, policy.data_path), int(first), int(step))
        site._check_own()
        return site

    def _check_own(self) -> None:
        """Raise unless the policy is fit for a site's own data."""
        policy = self.policy
        if policy.allow_unsanitised:
            raise SiteError("allow-unsanitised is only for simulation; leave it out", code="site.allow-unsanitised")
        least = {
            "min-noise-multiplier": policy.min_noise_multiplier,
            "noise of rows": policy.rows.noise,
            "floor of clipping": policy.clipping.floor,
        }
        for key, value in least.items():
            if not value > 0:
                raise SiteError(f"{key} must be above 0 at a site, got {value:g}", code="site.not-positive")
        if "min_clients" in policy.model_fields_set and policy.release is AcceptedRelease.CLIENT:
            raise SiteError(
                'min-clients is for sums over clients: set release = "site", or "any", or leave it out',
                code="site.min-clients",
            )
        if self.placed and policy.role is not Role.SPLIT:
            raise SiteError(
                f"place works only with role split, not {policy.role}; leave place out",
                code="site.role",
            )
        if policy.insecure_seed and policy.has_budget:
            text = 'insecure-seed leaves no epsilon for a budget to count: set budget = "inf", and leave row-budget out'
            raise SiteError(text, code="site.insecure-seed")
        if policy.protect is Protect.ROWS and math.isinf(policy.row_budget.epsilon) and not policy.insecure_seed:
            raise SiteError('protect = "rows" needs a row-budget; set it, with a delta', code="site.row-budget")
        _ = self.ledger_path, self.witness_folder, self.keep_model

    @cached_property
    def ledger_path(self) -> Path | None:
        """The file of the journal; None in simulation, where the run's memory holds totals."""
        if self.simulated:
            return None
        if not self.policy.ledger_path:
            if "ledger_path" in self.policy.model_fields_set:
                # An empty entry may be a mistake, and another ledger does not know past spending.
                raise SiteError("ledger-path must be absolute; leave it out for the default", code="site.relative-path")
            return umbel_home() / "ledger.jsonl"
        return _path("ledger-path", self.policy.ledger_path)

    @cached_property
    def witness_folder(self) -> Path | None:
        """The folder of the journal's witness; None for the default."""
        folder = _path("witness-path", self.policy.witness_path)
        if folder and self.ledger_path and folder.resolve() == self.ledger_path.parent.resolve():
            text = "witness-path must be another folder than the journal's: whoever restores that would restore both"
            raise SiteError(f"{text}; name one on another disk", code="site.witness")
        return folder

    @cached_property
    def keep_model(self) -> Path | None:
        """Folder for each client's best hypothesis at the end of a run."""
        return _path("keep-model", self.policy.keep_model)

    @cached_property
    def limits(self) -> Limits:
        """The limits of a client."""
        policy = self.policy
        # The exact decimals that people wrote.
        budget, paper, rows = (
            one if math.isinf(one) else exact(one)
            for one in (policy.budget.epsilon, policy.paper_budget, policy.row_budget.epsilon)
        )
        least = policy.min_noise_multiplier, policy.max_choice_epsilon, policy.trainers_report
        of_rows = rows, policy.row_budget.delta, policy.dearest_of_rows
        return Limits(budget, policy.budget.delta, paper, policy.max_participations, *least, *of_rows)

    def check_priced(self, release: Release) -> None:
        """Raise `Refused` if there is a budget, and the release has no bound that it could count."""
        if not (self.limits.row_budget == math.inf or self.limits.bounds_rows(release)):
            reason = row_gap(release) or "it has no pure epsilon, and the site's row-budget no delta"
            text = f"this site has a row-budget, but the requested release has no bound for rows: {reason}"
            raise Refused(text, code="refused.unbounded-rows")
        if self.limits.budget == math.inf or self.limits.bounds(release):
            return
        reason, fix = gap(release), 'ask for clipping "public", and for a choice-epsilon or 1 hypothesis'
        if not reason:
            reason = f"mechanism {release.mechanism!r} has no pure epsilon"
            fix = "give budget a delta in this node's configuration, and max-choice-epsilon if there is a choice"
        raise Refused(
            f"this site has a budget, but the requested release has no bound: {reason}; {fix} "
            "(the paper's heuristic has a separate limit, paper-budget)",
            code="refused.unbounded",
        )

    @property
    def approves(self) -> bool:
        """Whether people decide on runs: on all, or on those that no listed researcher signed."""
        return not self.simulated and (self.policy.approve is Approval.ASK or bool(self.policy.researchers))

    @cached_property
    def server(self) -> str:
        """The server that the node trusts (`umbel.protocol.signatures.server_of`); empty if its connection does not
        show that."""
        authority = os.environ.get(SERVER_CA)
        return server_of(Path(authority)) if authority else ""

    @property
    def identity(self) -> str:
        """The node's identity among nodes that share its ledger: its data, and which of the clients it hosts."""
        return f"{self.data_path}\n{self.first}/{self.step}"

    @property
    def placed(self) -> bool:
        """Whether the node hosts a part of a dataset whose other clients other nodes host."""
        return self.simulated or self.step > 1

    @property
    def insecure_seed(self) -> bool:
        """Whether a site with its own data still draws from the run's seed."""
        return self.policy.insecure_seed and not self.simulated

    def client_ids(self, clients: Sequence[ClientOnNode]) -> list[ClientInDataset]:
        """Return the numbers in the dataset of clients of the node."""
        return cast(list[ClientInDataset], counted(clients, self.first, self.step))

    def local_ids(self, clients: Sequence[ClientInDataset]) -> list[ClientOnNode]:
        """Return the numbers on the node of clients of the dataset."""
        own = (self.first, self.step) == (0, 1)
        return cast(list[ClientOnNode], clients if own else [(client - self.first) // self.step for client in clients])

    def seed(self, run: RunConfig) -> int | None:
        """Return the run's seed in simulation, None where the data are the site's own."""
        return run.seed if self.simulated or self.insecure_seed else None


def _environment() -> dict[str, Any]:
    """Return the entries in the environment."""
    entries: dict[str, Any] = {}
    for name in filter(_OURS, os.environ):
        if name in _NO_ENTRIES:
            continue
        # A misspelt name would set no limit, or two names would set one limit twice.
        if name != name.upper() or "-" in name:
            raise SiteError(f"{name}: write it as {name.upper().replace('-', '_')}", code="site.variable")
        entries[name.removeprefix(_PREFIX).replace("_", "-").lower()] = os.environ[name]
    return entries


def _path(key: str, text: str) -> Path | None:
    """Return an entry that must be an absolute path, because a Flower process may have any working directory."""
    if not text:
        return None
    with suppress(RuntimeError):  # no such user: the path then stays relative
        text = str(Path(text).expanduser())
    path = Path(text)
    if not path.is_absolute():
        raise SiteError(f"{key} must be an absolute path, got {text!r}", code="site.relative-path")
    return path
