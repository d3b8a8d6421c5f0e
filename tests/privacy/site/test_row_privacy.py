"""Training that hides each row of a client, at the gate: what a site accepts, what it charges, and what leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.errors import raises
from tests.helpers.messages import Behind, asked, of_node, refused, releases, stacked, task_of, through_gate
from tests.helpers.sites import own
from umbel.privacy.accounting.guarantee import secure_release, site_release
from umbel.privacy.accounting.rows import by_steps
from umbel.privacy.site.charges import Limits, priced
from umbel.privacy.site.journal import Journal
from umbel.privacy.site.totals import Totals
from umbel.protocol.errors import Refused
from umbel.protocol.release import Clipping, Kind, Release, ReleaseBy, RowPrivacy
from umbel.protocol.tasks import TrainingSpec

ROWS: dict[str, Any] = {"row_clip_norm": 1.0, "row_noise_multiplier": 1.0, "row_rate": 0.1, "row_batch": 10.0}
PUBLIC: dict[str, Any] = {"clipping": "public", "choice_epsilon": 1.0}
ALONE = task_of(**PUBLIC, **ROWS, noise_multiplier=0.0)
BOTH = task_of(**PUBLIC, **ROWS)
CLIENTS = task_of(**PUBLIC)
SITE: dict[str, Any] = {"protect": "rows", "budget": "inf", "row_budget": "8 delta=1e-5"}
STEPS = RowPrivacy(1.0, 1.0, 0.1, 10.0, 10)
LAYOUT = {"weight": (2,)}


@pytest.mark.parametrize(
    ("entries", "task", "code"),
    [
        ({}, CLIENTS, ""),
        ({}, BOTH, "refused.rows"),
        ({"rows": "largest=2000"}, BOTH, ""),
        ({"row_budget": 8}, BOTH, ""),
        ({}, ALONE, "refused.unsanitised"),
        (SITE, ALONE, ""),
        (SITE, BOTH, ""),
        (SITE, replace(BOTH, noise_multiplier=1e-3), ""),
        (SITE, CLIENTS, ""),
        (SITE, replace(CLIENTS, noise_multiplier=0.5), "refused.noise"),
        (SITE, replace(CLIENTS, noise_multiplier=0.0), "refused.unsanitised"),
        ({"protect": "both"}, BOTH, ""),
        ({"protect": "both"}, CLIENTS, "refused.rows"),
        ({"protect": "both"}, ALONE, "refused.unsanitised"),
        ({"protect": "both"}, replace(BOTH, noise_multiplier=0.5), "refused.noise"),
        (SITE, replace(ALONE, row_noise_multiplier=0.49), "refused.row-noise"),
        (SITE | {"rows": "noise=2"}, ALONE, "refused.row-noise"),
        (SITE | {"rows": "rate=0.09"}, ALONE, "refused.row-rate"),
        (SITE | {"rows": "rate=0.1"}, ALONE, ""),
        (SITE | {"max_work": "steps=9"}, ALONE, "refused.work"),
        (SITE | {"max_work": "steps=10"}, ALONE, ""),
        (SITE | {"clipping": "public"}, replace(ALONE, clipping=Clipping.UPDATE), "refused.clipping"),
    ],
)
def test_a_site_accepts_what_hides_what_it_demands(entries: dict[str, Any], task: TrainingSpec, code: str) -> None:
    """Noise that hides a client hides its rows. The task is one epoch at rate 1/10, ten steps."""
    if not code:
        own(**entries).policy.check(task, 1)
        return
    with raises(Refused, code):
        own(**entries).policy.check(task, 1)


def test_a_budget_of_a_client_alone_refuses_what_hides_rows_alone_and_the_other_way_round() -> None:
    open_choice = replace(release(), hypotheses=2, choice_epsilon=0.0)
    with raises(Refused, "refused.unbounded"):
        own(budget=8).check_priced(release())
    own(**SITE).check_priced(release())
    with raises(Refused, "refused.unbounded-rows", "open"):
        own(**SITE).check_priced(open_choice)
    with raises(Refused, "refused.unbounded-rows", "delta"):
        own(**SITE | {"row_budget": 8}).check_priced(release())


def release() -> Release:
    """Return the release of a client that trained by `ALONE`."""
    return Release(Kind.TRAIN, 2, 0.0, Clipping.PUBLIC).trained_by(STEPS)


def test_no_ledger_keeps_what_a_server_calls_a_mechanism_that_adds_nothing() -> None:
    """A journal's witness has room for a price of each mechanism that a site accepts, and for no others."""
    task = replace(ALONE, mechanism="\U0001f600" * 200)
    own(**SITE).policy.check(task, 1)
    assert task.release(2, 1) == release()


def test_a_client_may_release_until_its_rows_have_spent_their_budget_whatever_a_server_varies() -> None:
    """The mechanism, the radius, the number of parameters and noise of next to nothing cost a row nothing."""
    limits, often = own(**SITE).limits, list[int]()
    changes: list[Callable[[int], dict[str, Any]]] = [
        lambda _: {},
        lambda i: {"mechanism": f"package:Mechanism{i}"},
        lambda i: {"radius": float(i + 1)},
        lambda i: {"n": i + 1},
        lambda i: {"noise_multiplier": 1e-9 * (i + 1)},
    ]
    for change in changes:
        account = dict[Release, int]()
        for i in range(100):
            one = replace(release(), **change(i))
            if limits.allow(account, one):
                account[priced(one)] = account.get(priced(one), 0) + 1
        often.append(sum(account.values()))
        assert not limits.allow(account, replace(release(), row_noise_multiplier=0.9))
        assert limits.allow(account, replace(release(), row_noise_multiplier=1e6)), "which costs next to nothing"
    assert often == [often[0]] * len(changes)
    assert 1 < often[0] < 100
    assert limits.any
    assert Limits(participations=5).allow({}, release())


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("choice", [0.0, 1.0])
@pytest.mark.parametrize("by", [ReleaseBy.CLIENT, ReleaseBy.SITE, ReleaseBy.SECURE])
@pytest.mark.parametrize("settings", [{}, ROWS])
def test_releases_count_by_steps_just_where_training_hides_rows_in_local_parameters_too(
    k: int, choice: float, by: ReleaseBy, settings: dict[str, Any]
) -> None:
    task = task_of(clipping="public", choice_epsilon=choice, release_by=by, mechanism="discrete-gaussian", **settings)
    charged = {ReleaseBy.CLIENT: lambda one: one, ReleaseBy.SITE: site_release, ReleaseBy.SECURE: secure_release}[by]
    assert by_steps(charged(task.release(2, k, 1.0))) is task.hides_rows(k)
    assert task.hides_rows(k) is (bool(settings) and (k == 1 or (choice > 0 and by is ReleaseBy.CLIENT)))


# --- through the gate


def trained(values: Any, rows: RowPrivacy | None = STEPS) -> Behind:
    """Return clients that trained to these parameters, and hid rows like this."""
    results = [np.zeros(len(values), int), *stacked(values, LAYOUT).values()]
    return Behind(lambda task, assigned: results, rows=rows)


def test_the_model_leaves_as_it_was_trained_within_the_clip_norm_and_is_charged() -> None:
    node = of_node({"partition-id": 0, "num-partitions": 1})
    task = replace(ALONE, clients=(0, 1), clip_norm=5.0)
    reply = through_gate(asked(stacked([[0.0, 0.0]], LAYOUT), task), node, trained([[3.0, 4.0], [6.0, 8.0]]))
    assert np.allclose(releases(reply)["weight"], [[3.0, 4.0], [3.0, 4.0]])
    assert Totals(node.state).account(0) == {release(): 1}  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [None, replace(STEPS, steps=9)])
def test_what_was_trained_without_hiding_rows_as_asked_does_not_leave(rows: RowPrivacy | None) -> None:
    node = of_node({"partition-id": 0, "num-partitions": 1})
    assert refused(through_gate(asked(stacked([[0.0, 0.0]], LAYOUT), ALONE), node, trained([[1.0, 1.0]], rows)))


def test_a_server_that_knows_the_seed_is_charged_as_if_there_were_no_noise(tmp_path: Path) -> None:
    ledger = Journal.create(tmp_path / "ledger.jsonl")
    entries = {
        "data-path": "/data/site", "protect": "rows", "budget": "inf", "insecure-seed": True,
        "ledger-path": str(ledger.path),
    }  # fmt: skip
    through_gate(asked(stacked([[0.0, 0.0]], LAYOUT), ALONE), of_node(entries), trained([[1.0, 1.0]]))
    assert list(ledger.account(0)) == [release().without_noise()]  # type: ignore[arg-type]


def test_the_dearest_participation_of_a_row_follows_from_the_sites_limits_alone() -> None:
    limits = {"rows": "noise=2.0 rate=0.1", "max_work": "steps=7", "max_choice_epsilon": 0.5}
    dearest = own(**SITE, **limits).limits.dearest
    assert dearest is not None
    told = dearest.row_noise_multiplier, dearest.row_rate, dearest.row_steps, dearest.hypotheses, dearest.choice_epsilon
    assert told == (2.0, 0.1, 7, 2, 0.5)
    single = own(**SITE, **limits, max_hypotheses=1).limits.dearest
    assert single is not None
    assert not single.chooses


@pytest.mark.parametrize(
    "changes",
    [
        {"max_work": "steps=inf"}, {"max_choice_epsilon": "inf"},
        {"protect": "clients", "row_budget": "inf"},
    ],
)  # fmt: skip
def test_limits_that_are_infinite_name_no_dearest_participation(changes: dict[str, Any]) -> None:
    assert own(**SITE | changes).policy.dearest_of_rows is None
