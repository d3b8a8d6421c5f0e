"""Which runs a site answers: of its strategies, signed by its researchers, or approved by its people."""

from __future__ import annotations

import os
import re
import tomllib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from typer.testing import CliRunner

import umbel.privacy.site.consent
import umbel.privacy.site.runs
from tests.cli.commands.test_requests import Site
from tests.helpers.keys import pair
from tests.helpers.messages import refused
from umbel.cli.main import app as command
from umbel.deploy import certs
from umbel.privacy.site.config import SERVER_CA
from umbel.privacy.site.journal import Journal
from umbel.privacy.site.runs import SHOWN, Runs, Status
from umbel.protocol.run_config import RunConfig
from umbel.protocol.signatures import server_of, sign

P384 = int(
    "ffffffffffffffffffffffffffffffffffffffffffffffffc7634d81f4372ddf581a0db248b0a77aecec196accc52973", 16
)  # the order of the curve
LATER = datetime.now(UTC) + timedelta(days=1)
AFTER = LATER + timedelta(days=1)


def of(site: Site, run_config: dict[str, Any], run: int = 1) -> Site:
    """Let the site's messages come from another run."""
    for context in site.grid.contexts.values():
        context.run_config, context.run_id = run_config, run
    return site


def codes(site: Site) -> set[str]:
    """Return the codes of the site's log."""
    lines = Journal(site.ledger).messages()
    return {line["reason"].rpartition("[")[2].rstrip("]") for line in lines if line["reason"]}


def answers(site: Site) -> bool:
    replies = [refused(one) for one in (site.query(), site.train(), site.evaluate(), site.keep())]
    assert len(set(replies)) == 1, "all of a run, or nothing"
    return not replies[0]


@pytest.fixture(autouse=True)
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The certificate authority by which the site knows its server."""
    certs.make(tmp_path / "certs", [], [])
    monkeypatch.setenv(SERVER_CA, str(tmp_path / "certs" / "ca.crt"))
    return tmp_path / "certs" / "ca.crt"


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, tuple[Path, str]]:
    """A researcher whom the site knows, and a stranger."""
    return {name: pair(tmp_path / name) for name in ("ann", "bob")}


Sign = Callable[..., dict[str, Any]]


@pytest.fixture
def signed(run_config: dict[str, Any], keys: dict[str, tuple[Path, str]]) -> Sign:
    """What signs the run config for the server of the authority that the site trusts."""

    def made(key: Path = keys["ann"][0], until: datetime = LATER) -> dict[str, Any]:
        server = server_of(Path(os.environ[SERVER_CA]))
        return run_config | {"signature": sign(RunConfig.of(run_config).unsigned(), key, until, server)}

    return made


@pytest.fixture
def knows_ann(keys: dict[str, tuple[Path, str]]) -> dict[str, str]:
    return {"researchers": f"ann={keys['ann'][1].split()[1]}"}


@pytest.fixture
def site(tmp_path: Path, run_config: dict[str, Any], knows_ann: dict[str, str]) -> Site:
    return Site(tmp_path, run_config, approve="policy", **knows_ann)


def test_a_listed_researchers_run_is_answered_and_every_other_one_waits(
    site: Site, run_config: dict[str, Any], signed: Sign, keys: dict[str, tuple[Path, str]]
) -> None:
    assert answers(of(site, signed(), 7))
    assert site.waiting == []
    [request] = Runs(site.ledger).requests()
    assert (request.person, request.reason) == ("ann", "signed")
    assert {line["request"] for line in Journal(site.ledger).messages() if line["paid"]} == {request.digest[:SHOWN]}
    assert not answers(of(site, run_config, 8)), "not signed"
    assert len(site.waiting) == 1
    assert not answers(of(site, signed(keys["bob"][0]), 9)), "signed by a stranger: the same request"
    assert len(site.waiting) == 1
    assert not answers(of(site, signed() | {"rounds": 99}, 10)), "changed since"
    assert len(site.waiting) == 2
    assert "not known to this site" in site.run("requests")
    site.run("approve", site.waiting[0])
    assert answers(of(site, run_config, 8))


def test_people_can_stop_a_signed_run(site: Site, signed: Sign) -> None:
    assert not refused(of(site, signed()).train())
    [request] = Runs(site.ledger).requests()
    site.run("refuse", request.digest)
    assert refused(site.train())
    assert not answers(of(site, signed(until=AFTER), 2)), "nor signed again"


def test_a_message_that_asks_for_something_else_than_was_signed_waits(site: Site, signed: Sign) -> None:
    assert refused(of(site, signed()).train(local_steps=7))
    [request] = Runs(site.ledger).requests()
    assert request.status is Status.WAITING
    assert (request.asks["differs"], request.asks["researcher"]) == ({"local_steps": "7"}, "ann")


def test_a_site_that_asks_for_every_run_says_who_signed_it(
    tmp_path: Path, run_config: dict[str, Any], signed: Sign, knows_ann: dict[str, str]
) -> None:
    site = Site(tmp_path, run_config, **knows_ann)
    assert not answers(of(site, signed()))
    site.run("approve", site.waiting[0], "--by", "Dr. Day", "--reason", "trial 7")
    assert answers(site)
    assert answers(of(site, signed(until=AFTER), 2)), "the same settings"
    assert not answers(of(site, run_config, 3)), "which Ann has not signed"
    assert "by Dr. Day: trial 7" in site.run("requests", "--all")
    [decision] = [line for line in Journal(site.ledger).messages() if line["decision"] == "approved"]
    assert decision["reason"].endswith("by Dr. Day: trial 7")
    [approved, waiting] = Runs(site.ledger).requests()
    assert (approved.person, approved.reason, waiting.person) == ("Dr. Day", "trial 7", "")
    assert approved.policy == waiting.policy == decision.get("policy", approved.policy)


def test_a_signature_approves_nothing_once_the_site_asks_its_people(
    tmp_path: Path, site: Site, run_config: dict[str, Any], signed: Sign, knows_ann: dict[str, str]
) -> None:
    once = signed()
    assert not refused(of(site, once, 7).train())
    asking = Site(tmp_path / "asking", run_config, **knows_ann, **{"ledger-path": str(site.ledger)})
    asking.ledger = site.ledger
    assert refused(of(asking, once, 7).train()), "the site's people have not approved it"
    [digest] = asking.waiting
    [request] = Runs(site.ledger).requests()
    assert (request.person, request.reason, request.decided) == ("", "", "")
    asking.run("approve", digest, "--by", "Dr. Day")
    assert not refused(of(asking, once, 7).train())
    assert not refused(of(site, once, 7).train()), "and of a site that does not ask any more"


def test_a_decision_names_the_policy_under_which_it_was_made(tmp_path: Path, run_config: dict[str, Any]) -> None:
    site = Site(tmp_path, run_config)
    [config] = [context.node_config for context in site.grid.contexts.values()]
    digests = []
    for most in (5, 4, 3):
        config["max-hypotheses"] = most
        site.query()
        digests.append(Runs(site.ledger).requests()[0].policy)
        if most == 4:
            site.run("approve", site.waiting[0])
    assert digests[0] != digests[1] == digests[2]


def test_a_signature_is_for_one_run_and_ends(site: Site, signed: Sign) -> None:
    once = signed()
    assert answers(of(site, once, 7))
    assert not answers(of(site, once, 8)), "a server could repeat a run that was signed once"
    assert not refused(of(site, once, 7).train())
    assert not answers(of(site, signed(until=datetime.now(UTC) - timedelta(minutes=2)), 9))
    until, _, coded = once["signature"].split(" ")
    assert not answers(of(site, once | {"signature": f"{until} {coded}"}, 10)), "it names no server"
    assert codes(site) == {"refused.signature"}
    assert site.waiting == [], "a listed researcher's old signature is refused, not asked about"


def test_another_server_cannot_use_a_signed_run(
    site: Site, signed: Sign, authority: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site of two federations lists the same researcher in both, and has one ledger."""
    certs.make(tmp_path / "elsewhere", [], [])
    once = signed()
    monkeypatch.setenv(SERVER_CA, str(tmp_path / "elsewhere" / "ca.crt"))
    assert not answers(of(site, once, 7)), "a server elsewhere repeats it"
    monkeypatch.setenv(SERVER_CA, "")
    assert not answers(of(site, once, 7)), "no certificate shows which server this is"
    assert codes(site) == {"refused.other-server"}
    monkeypatch.setenv(SERVER_CA, str(tmp_path / "gone.crt"))
    assert not answers(of(site, once, 7)), "the certificate cannot be read"
    monkeypatch.setenv(SERVER_CA, str(authority))
    assert answers(of(site, once, 7)), "where it was signed for it has not been used yet"
    assert site.waiting == []


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa"])
def test_a_signature_that_is_written_in_another_way_is_for_the_same_run(
    kind: str, tmp_path: Path, run_config: dict[str, Any], signed: Sign
) -> None:
    """A server can make other texts of a signature without the key."""
    key, public = pair(tmp_path / "cy", kind)
    site = Site(tmp_path, run_config, approve="policy", researchers=f"cy={public.split()[1]}")
    once = signed(key)
    until, coded = once["signature"].rsplit(" ", 1)
    others = [f"{coded}\n", f"!{coded}", f"{coded}=", f"{coded[:9]} {coded[9:]}"]
    if kind == "ecdsa":
        r, s = decode_dss_signature(urlsafe_b64decode(coded))
        others.append(urlsafe_b64encode(encode_dss_signature(r, P384 - s)).decode())
    assert answers(of(site, once, 7))
    for run, other in enumerate(others, 8):
        assert not answers(of(site, once | {"signature": f"{until} {other}"}, run)), "a server could repeat a run"
    assert codes(site) == {"refused.signature"}
    assert answers(of(site, signed(key, AFTER), 99)), "signed again"


def test_no_client_takes_part_more_often_than_the_approved_run_says(tmp_path: Path, run_config: dict[str, Any]) -> None:
    """The price that people approve is that of so many participations."""
    config = run_config | {"rounds": 3, "max-participations": 2}
    site = Site(tmp_path, config)
    site.query()
    assert "at most 2 participations of a client" in site.run("requests")
    site.run("approve", site.waiting[0])
    replies = [refused(site.train(clients=clients)) for clients in ((0,), (0, 1), (0, 1), (0,), (0, 1))]
    assert replies == [False, False, False, True, True]
    assert {client: sum(own.values()) for client, own in Journal(site.ledger).accounts().items()} == {0: 2, 1: 2}
    assert not refused(of(site, config, 2).train(clients=(0,))), "another run of the same settings has its own"


def test_no_client_reports_more_often_than_the_approved_run_says(tmp_path: Path, run_config: dict[str, Any]) -> None:
    """Else a run of one round could spend all that validation clients have."""
    config = run_config | {"rounds": 1, "restarts": 2}
    site = Site(tmp_path, config, budget=8.0)
    Journal.create(site.ledger)
    site.query()
    assert re.search(r"reports, at most 4 reports of a client.*any two data sets: 0\.8;", site.run("requests"))
    site.run("approve", site.waiting[0])
    for round in (0, 0, 1, 2, 1, 1):
        site.evaluate(round=round)
    [account] = Journal(site.ledger).accounts().values()
    assert sum(account.values()) == 4
    assert any("or took part 4 times" in line["reason"] for line in Journal(site.ledger).messages())
    of(site, config, 2).evaluate()
    [account] = Journal(site.ledger).accounts().values()
    assert sum(account.values()) == 5, "another run of the same settings has its own"


@pytest.mark.parametrize("most", [100, 0])
def test_before_approval_a_server_does_not_find_out_which_model_fits_the_data(
    most: int, tmp_path: Path, run_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(umbel.privacy.site.runs, "_MOST_WAITING", most)
    site = Site(tmp_path, run_config)
    read = set()
    for model in ("linear", "mlp inputs=9 hidden=2 outputs=1"):
        of(site, run_config | {"model": model})
        read |= {site.query().error.reason, site.keep().error.reason}
    assert read == {"refused [refused.waits]" if most else "refused [refused.too-many-wait]"}
    if most:
        assert "cannot be approved here: the server asks for model" in str([*Journal(site.ledger).messages()])
        site.run("approve", site.waiting[0])
        assert not refused(of(site, run_config | {"model": "linear"}).query())
        (tmp_path / "own").rename(tmp_path / "away")
        assert site.query().error.reason == "refused", "the site's fault, of which its people know"


def test_a_fault_in_the_data_is_only_in_the_nodes_own_log(
    tmp_path: Path, run_config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    site = Site(tmp_path, run_config)
    rows = np.load(tmp_path / "own" / "targets.npy")
    np.save(tmp_path / "own" / "targets.npy", np.full_like(rows, np.nan))
    assert site.query().error.reason == "refused [refused.waits]"
    [line] = Journal(site.ledger).messages()
    assert "cannot be approved here: DatasetError; see the node's own log" in line["reason"]
    assert "data.not-finite" in caplog.text


def test_a_site_answers_the_strategies_that_it_accepts(tmp_path: Path, run_config: dict[str, Any]) -> None:
    site = Site(tmp_path, run_config, approve="policy", strategies="own.code:group-privacy ifca")
    assert not answers(site)
    assert codes(site) == {"refused.strategy"}
    assert answers(of(site, run_config | {"strategy": "ifca"}, 2))


def test_a_run_is_signed_from_the_command_line(
    tmp_path: Path, run_config: dict[str, Any], site: Site, keys: dict[str, tuple[Path, str]]
) -> None:

    config = tmp_path / "mine.toml"
    config.write_text(tomli_w.dumps(run_config | {"rounds": 9}))
    server = ["--root-certificates", os.environ[SERVER_CA]]
    done = CliRunner().invoke(command, ["sign", str(config), "--key", str(keys["ann"][0]), *server])
    assert done.exit_code == 0, done.output
    written = tomllib.loads((tmp_path / "mine.signed.toml").read_text())
    assert written.keys() == set(RunConfig.names()), "whole, so that an app's own defaults change nothing"
    assert answers(of(site, written, 5))
    done = CliRunner().invoke(command, ["sign", str(config), "--key", str(config), *server])
    assert "[certificate.no-key]" in done.output
