"""What a server reads of a refusal: one word, and the code of a decision that no data took part in."""

from __future__ import annotations

import pytest

from tests.helpers.codes import made
from tests.helpers.messages import asked, of_node, task_of, through_gate, to_node
from tests.privacy.site.test_entry import BROKEN, CLIENTS, ZEROS
from tests.privacy.site.test_entry import ledger as ledger
from tests.privacy.site.test_entry import own as own
from umbel.privacy.site.refusals import PUBLIC, refusal
from umbel.protocol.errors import DatasetError, Refused
from umbel.protocol.messages import query
from umbel.protocol.tasks import EvaluationSpec


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Refused("nu 1 is below 2", code="refused.noise"), "refused [refused.noise]"),
        (Refused("row 3 is 0.1", code="refused.result"), "refused"),
        (Refused("no code"), "refused"),
        (DatasetError("row 3 is 0.1", code="refused.noise"), "refused"),
        (ValueError("0.1"), "refused"),
        (None, "refused"),
    ],
)
def test_only_a_public_code_leaves(error: Exception | None, reason: str) -> None:
    assert refusal(to_node(query(), "query"), error).error.reason == reason


def test_public_codes_exist_and_those_that_follow_from_data_are_not_among_them() -> None:
    codes = {code for one in made() for code in one.codes if code.startswith("refused.")}
    assert codes > PUBLIC
    assert codes - PUBLIC == {
        f"refused.{reason}" for reason in ("arrays", "handler", "layers", "mechanism-shape", "numpy-client", "result")
    }


def test_a_site_tells_that_its_policy_decided_and_nothing_of_its_data(own: dict[str, object]) -> None:
    said = [
        through_gate(asked(ZEROS, *tasks), of_node(own), does).error.reason
        for tasks, does in (
            ((task_of((0, 1), noise_multiplier=0.0),), CLIENTS),
            ((None, EvaluationSpec(1, (4,))), BROKEN),
            ((task_of((0, 1), noise_multiplier=0.0), EvaluationSpec(1, (4,))), BROKEN),
        )
    ]
    assert said == ["refused [refused.unsanitised]", "refused", "refused [refused.unsanitised]"]
