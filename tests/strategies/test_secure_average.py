"""Whole runs in which the server reads only the sum over all sites."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from flwr.app import Error, Message

from tests.helpers.errors import raises
from tests.helpers.ledgers import ledger_of
from tests.helpers.paper import ACCEPTED
from tests.helpers.sources import ROOT
from umbel.privacy.accounting.guarantee import guarantee
from umbel.privacy.channels.secure.channel import Secure
from umbel.privacy.site.journal import Journal
from umbel.protocol.arrays import flatten
from umbel.protocol.errors import ConfigError, FleetError
from umbel.protocol.flower import ErrorCode
from umbel.protocol.release import Kind, ReleaseBy
from umbel.protocol.signatures import line_of
from umbel.protocol.tasks import TrainingSpec
from umbel.server.run import Run
from umbel.simulation import in_process
from umbel.simulation.grid import InProcessGrid
from umbel.simulation.in_process import play, run_config
from umbel.strategies.differences import prior_of

CONFIG: dict[str, Any] = {
    "strategy": "secure-average", "clipping": "public norm=10", "mechanism": "discrete-gaussian",
    "noise_multiplier": 1.0, "choice_epsilon": 0.0, "restarts": 1, "rounds": 5, "clients_per_round": 60,
}  # fmt: skip


def played(nodes: int = 4, **changes: Any) -> Run:
    return play(run_config("synthetic", **CONFIG | changes), nodes=nodes)


def moved(run: Run) -> Any:
    return flatten(run.state.hypotheses)


# --- in simulation


def test_without_noise_it_learns_what_one_trusted_sum_does() -> None:
    """Updates are rounded to 2^-16 of the clip norm."""
    together = moved(played(noise_multiplier=0.0))
    trusted = moved(played(nodes=1, noise_multiplier=0.0, strategy="site-average"))
    assert np.allclose(together, trusted, atol=5 * 10 * 2.0**-16)
    assert not np.array_equal(together, trusted)


def test_a_hundred_clients_at_four_sites_find_both_models() -> None:
    run = played(rounds=30, clients_per_round=80, clipping="public norm=10 decay=0.9")
    first, last = run.state.history[0], run.state.history[-1]
    assert first.loss is not None
    assert last.loss is not None
    assert last.loss < 0.4 * first.loss
    assert run.setup.release.kind is Kind.SECURE


REPORTS: dict[str, Any] = {"strategy": "secure-average report-noise=10 report-bound=400", "rounds": 6}


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"mechanism": "gaussian"}, "mechanism"), ({"clipping": "update"}, "conflict"),
        ({"strategy": "secure-average colluding=2"}, "least"),
        *((REPORTS | changes, "report-noise") for changes in (
            {"restarts": 2}, {"validation": "by=median"}, {"noise_multiplier": 0.0},
        )),
    ],
)  # fmt: skip
def test_what_cannot_be_added_securely_is_refused_and_too_few_sites_before_any_client_trains(
    changes: dict[str, Any], code: str
) -> None:
    with raises(ConfigError, f"config.{code}"):
        played(**changes)
    with raises(FleetError, "nodes.too-few-parties"):
        played(nodes=2)


# --- what travels


def meddling(monkeypatch: pytest.MonkeyPatch, meddle: Callable[[Message, int, Message], Message | None]) -> None:
    """Have replies changed, or lost where `meddle` returns None; it gets a message, its node's number and the reply."""

    class Grid(InProcessGrid):
        def _answer(self, message: Message) -> Message:
            place = sorted(self.contexts).index(message.metadata.dst_node_id)
            reply = meddle(message, place, super()._answer(message))
            if reply is None:
                reply = Message(Error(ErrorCode.CLIENT_APP_CRASHED, "gone"), reply_to=message)
                self.numbered(reply)
            return reply

    monkeypatch.setattr(in_process, "InProcessGrid", Grid)


def stage_of(message: Message) -> str:
    record = message.content.get("secure")
    return "" if record is None else str(record["stage"])


def trained(run: Run) -> list[Any]:
    """Return the rounds that trained."""
    return [entry for entry in run.state.history if entry.asked]


# --- reports


def test_losses_are_added_up_with_noise_as_much_as_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 clients: the noise on a mean has a deviation of 10 diagonals / 100, which is 57 for a bound of 400.

    The same run that reports each client's exact loss says how far each of seven rounds is from the truth. The root
    mean square of 14 numbers lies outside of .5 to 1.6 deviations with a probability of 3 in 1,000.
    """
    exact, summed = (played(**changes) for changes in ({"rounds": 6}, REPORTS))
    assert np.array_equal(moved(exact), moved(summed))  # reports change nothing of what is learnt
    pairs = list(zip(exact.state.history, summed.state.history, strict=True))
    assert len(pairs) == 7
    away = [(two.loss - one.loss, two.metric - one.metric) for one, two in pairs]  # type: ignore[operator]
    deviation = 10 * np.sqrt(2) * 400 / 100
    assert 0.5 < np.sqrt(np.square(away).mean()) / deviation < 1.6
    assert all(entry.exact_reports == 0 for entry in summed.state.history)


def test_the_server_reads_no_report_of_a_single_site(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every reply has one record of masked numbers, and flags; none has scores."""
    seen: list[set[str]] = []
    meddling(monkeypatch, lambda message, place, reply: seen.append({*reply.content}) or reply)
    run = played(**REPORTS)
    assert len([entry for entry in run.state.history if entry.loss is not None]) == 7
    assert {name for names in seen for name in names} == {"hosting", "secure", "released"}


def test_each_client_that_reports_in_a_sum_is_charged() -> None:
    run = played(**REPORTS | {"rounds": 2})
    accounts = [ledger_of(context) for context in run.grid.contexts.values()]  # type: ignore[attr-defined]
    reports = [
        (release, times)
        for ledger in accounts
        for client in range(200)
        for release, times in ledger.account(client).items()
        if release.kind is Kind.REPORT
    ]
    assert reports
    assert {times for _, times in reports} == {3}
    assert {(release.mechanism, release.noise_multiplier) for release, _ in reports} == {("discrete-gaussian", 10.0)}


@pytest.mark.parametrize("stage", ["announce", "mask", "agree", "open"])
def test_a_round_and_its_reports_survive_a_third_of_the_sites_at_any_stage(
    monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """Ten sites, of which seven have to answer; three fall silent in round 1, or never say who they are."""
    meddling(monkeypatch, lambda asked, place, reply: None if stage_of(asked) == stage and place < 3 else reply)
    run = play(run_config("synthetic", **CONFIG | REPORTS | {"rounds": 1}), nodes=10, strict=False)
    start, first = run.state.history[:2]
    assert first.moved
    assert start.loss is not None
    there = [client for client in range(100) if client % 10 >= 3]
    taken = run.fleet.participations.nonzero()[0].tolist()
    if stage in ("agree", "open"):
        assert first.releases == 60
    else:
        assert first.releases == sum(client in there for client in taken) < 60


# --- second moments


def test_moments_tell_how_clients_differ_and_change_little_else() -> None:
    """Without noise: updates are clipped to a share of the clip norm, and the prior is that of one site's updates."""
    options = {"noise_multiplier": 0.0, "strategy": "secure-average explore=0.0", "rounds": 3}
    plain, run = played(**options), played(**options | {"strategy": "secure-average explore=0.0 moments=true"})
    np.testing.assert_allclose(moved(run), moved(plain), rtol=5e-3, atol=5e-3)
    prior = prior_of(run.strategy.state, 2)
    assert prior is not None
    assert prior.matrices.shape == (2, 2, 2)
    assert prior.trust.min() > 0.5


def test_moments_cost_no_privacy_and_their_noise_is_in_the_counts() -> None:
    plain, run = (played(rounds=2, strategy=f"secure-average moments={flag}") for flag in ("false", "true"))
    release = [one.setup.release for one in (plain, run)]
    assert guarantee({release[0]: 1}) == guarantee({release[1]: 1})
    noises = [Secure.count_deviation(TrainingSpec(release_by=ReleaseBy.SECURE, moments=flag)) for flag in (False, True)]
    assert noises[1] == pytest.approx(np.sqrt(2) * noises[0])


# --- sites that fall silent


@pytest.mark.parametrize("stage", ["mask", "agree", "open"])
def test_a_sum_of_too_few_fails_and_charges_and_the_next_one_works(monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    rounds: list[int] = []

    def lose(message: Message, place: int, reply: Message) -> Message | None:
        if stage_of(message) == "mask" and place == 0:
            rounds.append(1)
        return None if stage_of(message) == stage and place < 3 and len(rounds) == 1 else reply

    meddling(monkeypatch, lose)
    run = play(run_config("synthetic", **CONFIG | {"rounds": 2}), nodes=4, strict=False)
    first, second = run.state.history[1:]
    assert (first.moved, first.releases) == (False, 0)
    assert second.moved
    spent = [ledger_of(context) for context in run.grid.contexts.values()]  # type: ignore[attr-defined]
    charged = sum(
        sum(ledger.account(client).values()) for place, ledger in enumerate(spent) for client in range(place, 100, 4)
    )
    assert charged == 120


# --- sites that serve their own data


def keys(folder: Path, *names: str) -> tuple[dict[str, str], str]:
    """Write private keys; return their paths by name, and the sites' list of public ones."""
    folder.mkdir(exist_ok=True)
    paths, listed = {}, []
    for name in names:
        key, path = Ed25519PrivateKey.generate(), folder / name
        path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
        paths[name] = str(path)
        listed.append(f"{name}={line_of(key.public_key()).split()[1]}")
    return paths, " ".join(listed)


def sites(home: Path, *names: str, **changes: Any) -> list[dict[str, Any]]:
    """Return three sites of one dataset, or the named ones. Each has its own ledger and key."""
    home.mkdir(exist_ok=True)
    paths, listed = keys(home / "keys", *names or ("north", "south", "west"))
    common = {
        "data-path": str(ROOT / "datasets" / "synthetic.json"), "role": "split", "release": "secure", **ACCEPTED,
        "mechanisms": "discrete-gaussian", "parties": listed,
    }  # fmt: skip
    return [
        common | {"place": f"{i}/{len(paths)}", "ledger-path": str(home / f"{i}.jsonl"), "party-key": path}
        | {name.replace("_", "-"): value for name, value in changes.items()}
        for i, path in enumerate(paths.values())
    ]  # fmt: skip


OWN = {"dataset": "", "wait": "nodes=3", "rounds": 3, "noise_multiplier": 2.0}


def at_sites(nodes: list[dict[str, Any]], **changes: Any) -> Run:
    config = run_config("synthetic", **CONFIG | OWN | changes, model="linear")
    return play(config, node_configs=nodes, strict=False)


def test_sites_that_list_each_other_add_their_sums(umbel_home: Path) -> None:
    run = at_sites(sites(umbel_home))
    assert [(entry.releases, entry.moved) for entry in trained(run)] == [(60, True)] * 3
    accounts = [Journal(umbel_home / "0.jsonl").account(client) for client in range(0, 100, 3)]
    assert {release.kind for account in accounts for release in account} == {Kind.SECURE}


@pytest.mark.parametrize(
    "changes",
    [{"parties": "", "party_key": "", "release": "any"}, {"least_parties": 4}, {"colluding_parties": 1},
     {"release": "site"}, {"clipping": "public floor=20.0"}, {"mechanisms": "laplace"}, {"min_noise_multiplier": 3.0}],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_sites_whose_policy_asks_for_more_add_nothing(umbel_home: Path, changes: dict[str, Any]) -> None:
    run = at_sites(sites(umbel_home, **changes), rounds=1)
    assert not any(entry.moved for entry in run.state.history)
    for place in range(3):
        assert not any(Journal(umbel_home / f"{place}.jsonl").account(client) for client in range(100))


def test_a_site_that_is_not_in_the_others_lists_stops_no_sum(umbel_home: Path) -> None:
    """It lists itself and the others; the others list a key of another site in its place, and add without it."""
    nodes = sites(umbel_home, "north", "south", "east", "west")
    paths, listed = keys(umbel_home / "other", "west")
    *three, _ = nodes[0]["parties"].split()
    nodes[3] |= {"parties": " ".join([*three, listed]), "party-key": paths["west"]}
    run = at_sites(nodes, rounds=2, wait="nodes=4")
    assert [entry.moved for entry in trained(run)] == [True] * 2
    assert not any(Journal(umbel_home / "3.jsonl").account(client) for client in range(100))


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        *(("announce", said) for said in (
            {"key": "nonsense"}, {"public": bytes(32)}, {"signature": b""}, {"name": "node 3"}, {"name": "stranger"},
            {"listed-names": ["node 0"] * 5},
        )),
        ("mask", {"numbers": b""}), ("mask", {"proofs": [], "proofs-of": []}), ("mask", {"boxes": [b"none"] * 4}),
        ("agree", {"signature": b""}), ("open", {"layers": [bytes(16)]}),
        ("open", {"shares": [], "of": [], "with": []}),
    ],
    ids=str,
)  # fmt: skip
def test_a_site_that_is_not_who_it_says_or_sends_what_is_none_stops_no_sum(
    monkeypatch: pytest.MonkeyPatch, stage: str, said: dict[str, Any]
) -> None:
    """The first of five."""

    def meddle(message: Message, place: int, reply: Message) -> Message:
        if stage_of(message) == stage and place == 0 and not reply.has_error():
            reply.content["secure"].update(said)
        return reply

    meddling(monkeypatch, meddle)
    run = play(run_config("synthetic", **CONFIG | {"rounds": 2}), nodes=5, strict=False)
    assert [entry.moved for entry in trained(run)] == [True] * 2


def test_a_site_that_forgets_everything_comes_back_with_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of five sites is started again after round 1: it misses a round, and the others add without it."""
    asked: list[int] = []

    class Grid(InProcessGrid):
        def _answer(self, message: Message) -> Message:
            first = message.metadata.dst_node_id == min(self.contexts)
            if stage_of(message) == "mask" and first:
                asked.append(1)
                if len(asked) == 2:
                    self.contexts[message.metadata.dst_node_id].state.pop("umbel.secure")
            return super()._answer(message)

    monkeypatch.setattr(in_process, "InProcessGrid", Grid)
    run = play(run_config("synthetic", **CONFIG | {"rounds": 3}), nodes=5, strict=False)
    assert [entry.moved for entry in trained(run)] == [True] * 3
    assert len(asked) == 3
