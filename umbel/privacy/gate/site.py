"""A site: what a node knows about itself, and what it allows.

Everything comes from where the node runs, from its own node configuration and from its environment,
where ``min-noise-multiplier`` is ``UMBEL_MIN_NOISE_MULTIPLIER``; the node configuration wins. Nothing here
reads a message: a server must not be able to tell a site that it is simulated. The site's policy wins
over the server's task.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from umbel.privacy.accounting.guarantee import gap
from umbel.privacy.gate.charges import Limits
from umbel.privacy.gate.policy import AcceptedRelease, Policy, Role
from umbel.protocol.clients import ClientInDataset, ClientOnNode, counted
from umbel.protocol.errors import Refused, SiteError
from umbel.protocol.home import umbel_home
from umbel.protocol.old_names import SETTINGS
from umbel.protocol.plugins import TRUST
from umbel.protocol.release import Release, exact
from umbel.protocol.run_config import MAX_HYPOTHESES, RunConfig
from umbel.protocol.simulated import runs_in_simulation

DATA_PATH = "data-path"

# What Flower puts into the node configuration of a simulated node, and may put into another's.
_PARTITION = ("partition-id", "num-partitions")
_PREFIX = "UMBEL_"
_OURS = re.compile(_PREFIX, re.IGNORECASE).match
_NO_ENTRIES = ("UMBEL_HOME", TRUST)

_KNOWN = {*Policy.names(), *(old for old, new in SETTINGS.items() if new in Policy.names())}

# A simulated node holds no site's data, and allows what a run asks for.
_SIMULATED: dict[str, Any] = {
    "role": "split", "min-noise-multiplier": 0.0, "clip-norm-floor": 0.0, "release": "any", "min-clients": 1,
    "clipping": "any", "max-choice-epsilon": "inf", "budget": "inf", "exact-losses": True,
    "max-hypotheses": MAX_HYPOTHESES, "max-local-epochs": "inf", "max-local-steps": "inf", "max-examples": "inf",
    "max-seconds": "inf", "allow-unsanitised": True,
}  # fmt: skip


@dataclass(frozen=True)
class Site:
    """A node, as far as privacy is concerned.

    Attributes
    ----------
    policy : Policy
        What it allows.
    data_path : Path or None
        The data this node's own configuration names; None in simulation, where the node serves
        a part of the run config's dataset.
    first, step : int
        The node hosts the dataset's clients ``first, first + step, ...``: in simulation, and
        where the site's own ``place`` says so.
    """

    policy: Policy
    data_path: Path | None
    first: int = 0
    step: int = 1

    @classmethod
    def of(cls, node_config: Mapping[str, Any]) -> Site:
        """Return the site that a node configuration and the environment describe.

        Raises
        ------
        SiteError
            When the node is no simulation and names no data of its own, or an entry cannot be
            used: a slip of the pen never weakens a policy.
        """
        environment, node_config = Policy.current(_environment()), Policy.current(node_config)
        ignored = {*_PARTITION, *_app_keys(environment | dict(node_config))}
        own = {key: value for key, value in node_config.items() if key not in ignored}
        # The site's own path is asked for first: real nodes may have a partition-id as well.
        if own.get(DATA_PATH):
            if DATA_PATH in environment:
                raise SiteError("unset UMBEL_DATA_PATH: data-path is for a node's own entries", code="site.variable")
            policy = Policy.of(environment | own)
            first, step = _place(policy)
            site = cls(policy, _path(DATA_PATH, policy.data_path), first, step)
            site._check_own()
            return site
        if not runs_in_simulation():
            raise SiteError(
                f"this node serves no data: start it with --node-config '{DATA_PATH}=\"/path/to/data\"'",
                code="site.no-data",
            )
        # What else a user has in the environment is no policy of a simulated node.
        known = {key: environment[key] for key in _KNOWN & environment.keys() - {DATA_PATH}}
        policy = Policy.of(_SIMULATED | known | own)
        return cls(policy, None, int(node_config["partition-id"]), int(node_config["num-partitions"]))

    def _check_own(self) -> None:
        """Raise unless the policy is fit for data of one's own."""
        policy = self.policy
        if policy.allow_unsanitised:
            raise SiteError("allow-unsanitised is for simulation alone; leave it out", code="site.allow-unsanitised")
        for key in ("min-noise-multiplier", "clip-norm-floor"):
            if not (value := getattr(policy, key.replace("-", "_"))) > 0:
                raise SiteError(f"{key} must be above 0 at a site, got {value:g}", code="site.not-positive")
        if "min_clients" in policy.model_fields_set and policy.release is AcceptedRelease.CLIENT:
            raise SiteError(
                'min-clients is for sums over clients: set release = "site", or "any", or leave it out',
                code="site.min-clients",
            )
        if self.placed and policy.role is not Role.SPLIT:
            raise SiteError(
                f"place is for role split, where clients are numbered over the whole dataset; not {policy.role}",
                code="site.role",
            )
        if policy.insecure_seed and policy.budget < math.inf:
            text = 'insecure-seed leaves no epsilon that a budget could count: set budget = "inf"'
            raise SiteError(text, code="site.insecure-seed")
        _ = self.ledger_path, self.keep_model

    @cached_property
    def ledger_path(self) -> Path | None:
        """Where charges are kept; None, for the run's memory alone, in simulation."""
        if not self.policy.ledger_path:
            if self.simulated:
                return None
            if "ledger_path" in self.policy.model_fields_set:
                # Written down as empty it may be a slip, and another ledger has forgotten what was spent.
                raise SiteError("ledger-path must be absolute; leave it out for the default", code="site.relative-path")
            return umbel_home() / "ledger.sqlite"
        return _path("ledger-path", self.policy.ledger_path)

    @cached_property
    def keep_model(self) -> Path | None:
        """Folder for each client's best hypothesis at the end of a run."""
        return _path("keep-model", self.policy.keep_model)

    @cached_property
    def limits(self) -> Limits:
        """The most a client may give."""
        policy = self.policy
        # As people wrote them, exactly.
        budget, paper = (one if math.isinf(one) else exact(one) for one in (policy.budget, policy.paper_budget))
        least = policy.min_noise_multiplier, policy.max_choice_epsilon, policy.trainers_report
        return Limits(budget, policy.delta, paper, policy.max_participations, *least)

    def check_priced(self, release: Release) -> None:
        """Raise `Refused` where there is a budget, and nothing that it could count bounds a release."""
        if self.limits.budget == math.inf or self.limits.bounds(release):
            return
        reason, fix = gap(release), 'ask for clipping "public", and for a choice-epsilon or 1 hypothesis'
        if not reason:
            reason = f"mechanism {release.mechanism!r} has no pure epsilon"
            fix = "set delta, and max-choice-epsilon where there is a choice, in this node's configuration"
        raise Refused(
            f"this site has a budget, and nothing bounds what is asked for: {reason}; {fix} "
            "(the paper's heuristic has a limit of its own, paper-budget)",
            code="refused.unbounded",
        )

    @property
    def identity(self) -> str:
        """What tells the node from others that share its ledger: its data, and which of the clients it hosts."""
        return f"{self.data_path}\n{self.first}/{self.step}"

    @property
    def simulated(self) -> bool:
        """Whether the node holds no data of its own."""
        return self.data_path is None

    @property
    def placed(self) -> bool:
        """Whether the node hosts a part of a dataset whose other clients other nodes host."""
        return self.simulated or self.step > 1

    @property
    def insecure_seed(self) -> bool:
        """Whether a site with data of its own draws from the run's seed all the same."""
        return self.policy.insecure_seed and not self.simulated

    def client_ids(self, clients: Sequence[ClientOnNode]) -> list[ClientInDataset]:
        """Return the numbers in the dataset of clients of the node."""
        return cast(list[ClientInDataset], counted(clients, self.first, self.step))

    def local_ids(self, clients: Sequence[ClientInDataset]) -> list[ClientOnNode]:
        """Return the numbers on the node of clients of the dataset."""
        return cast(list[ClientOnNode], [(client - self.first) // self.step for client in clients])

    def seed(self, run: RunConfig) -> int | None:
        """Return the run's seed in simulation, None where the data are the site's own."""
        return run.seed if self.simulated or self.insecure_seed else None


def _environment() -> dict[str, Any]:
    """Return the entries that the environment sets."""
    entries: dict[str, Any] = {}
    for name in filter(_OURS, os.environ):
        if name in _NO_ENTRIES:
            continue
        # What is written otherwise would be no limit, or of two limits one.
        if name != name.upper() or "-" in name:
            raise SiteError(f"{name}: write it as {name.upper().replace('-', '_')}", code="site.variable")
        entries[name.removeprefix(_PREFIX).replace("_", "-").lower()] = os.environ[name]
    return entries


def _app_keys(entries: Mapping[str, Any]) -> list[str]:
    """Return the entries that are for an app of the site's, and none of umbel's."""
    named = str(entries.get("app-keys", "")).split()
    if taken := sorted(_KNOWN.intersection(named)):
        raise SiteError(f"app-keys names {taken[0]}, an entry of umbel's; rename the app's own", code="site.app-keys")
    return named


def _place(policy: Policy) -> tuple[int, int]:
    """Return i and n of ``place = "i/n"``."""
    first, _, step = policy.place.partition("/")
    if not (first.isdecimal() and step.isdecimal() and int(first) < int(step)):
        raise SiteError(f'place must be "i/n" with i from 0 to n - 1, got {policy.place!r}', code="site.place")
    return int(first), int(step)


def _path(key: str, text: str) -> Path | None:
    """Return an entry that must be an absolute path, because a Flower process may work anywhere."""
    if not text:
        return None
    path = Path(text).expanduser()
    if not path.is_absolute():
        raise SiteError(f"{key} must be an absolute path, got {text!r}", code="site.relative-path")
    return path
