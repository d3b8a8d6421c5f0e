"""A question about ranges has a name, a text and a price, which the schema that it makes passes on."""

from __future__ import annotations

import pytest

from umbel.protocol.ranges import RangesBefore, before, in_words, question_of
from umbel.protocol.release import Kind, ReleaseBy


@pytest.mark.parametrize(
    ("by", "kind"),
    [(ReleaseBy.CLIENT, Kind.TRAIN), (ReleaseBy.SITE, Kind.SITE), (ReleaseBy.SECURE, Kind.SECURE)],
)
def test_the_release_before_a_run_is_that_of_the_question_whose_noise_hides_clients(by: ReleaseBy, kind: Kind) -> None:
    release = RangesBefore(348, 14.0, "gaussian", by).release
    assert (release.kind, release.n, release.hypotheses) == (kind, 348, 1)
    assert (release.noise_multiplier, release.mechanism) == (14.0, "gaussian")


def test_a_provenance_tells_of_a_question_and_any_other_of_none() -> None:
    question = RangesBefore(116, 2.5, "discrete-gaussian", ReleaseBy.SECURE)
    assert before(f"Made from stays.csv. {question.provenance}") == str(question)
    assert RangesBefore.read(before(question.provenance), "ranges") == question
    assert before("Made from ranges.csv.") == ""


def test_people_read_the_columns_as_the_table_names_them() -> None:
    assert in_words(question_of(["blood pressure", "age"])).startswith("ranges of blood pressure, age: ")
    assert in_words("linear inputs=2 outputs=1") == ""
