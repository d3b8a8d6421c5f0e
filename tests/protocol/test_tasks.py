"""What a server asks of a node's clients, and what a node says of itself: checked before anybody acts on it."""

from __future__ import annotations

from typing import Any

import pytest
from flwr.app import ConfigRecord, MetricRecord
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ConfigDict, TypeAdapter, ValidationError

from tests.helpers.errors import raises
from tests.helpers.hostile import MISSING, TASKS, spoilt_round
from tests.helpers.messages import task_of
from tests.helpers.records import STACKED, over_the_wire
from tests.helpers.tasks import TRAINING, evaluations, trainings
from umbel.protocol.errors import ProtocolError
from umbel.protocol.messages import evaluation_in, hosting_in, hosting_reply, training_in
from umbel.protocol.release import Clipping, NoisePer, ReleaseBy, RowPrivacy
from umbel.protocol.tasks import VERSION, Clients, EvaluationSpec, Hosting, TrainingSpec

Asked = TrainingSpec | EvaluationSpec


def changed(asked: Asked = TRAINING, **entries: Any) -> ConfigRecord:
    """Return the record of what is asked with some entries changed; an entry of None is taken out."""
    values: dict[str, Any] = {**asked.to_record(), **entries}
    return ConfigRecord({name: value for name, value in values.items() if value is not None})


@given(st.one_of(trainings, evaluations))
def test_what_is_asked_comes_back_from_plain_values_beside_which_others_are_not_read(asked: Asked) -> None:
    record = asked.to_record()
    assert {type(value) for value in record.values()} <= {int, float, str, bool, list}
    arrived = type(asked).from_record(changed(asked, data_path="/etc/passwd"))
    assert arrived == asked
    if isinstance(arrived, TrainingSpec):
        assert (type(arrived.clipping), type(arrived.noise_per)) == (Clipping, NoisePer)


@pytest.mark.parametrize(("kind", "field", "value"), TASKS)
def test_a_task_that_cannot_be_is_refused_and_its_field_named(kind: str, field: str, value: Any) -> None:
    content = over_the_wire(spoilt_round(kind, field, value, STACKED))
    code, name = ("missing-key", field) if value is MISSING else ("wrong-value", field.replace("_", "-").rstrip("s"))
    with raises(ProtocolError, f"protocol.{code}", name):
        (training_in if kind == "training" else evaluation_in)(content)


@pytest.mark.parametrize("strange", [True, 0.5, ""])
def test_of_many_clients_that_are_none_one_is_told(strange: Any) -> None:
    """Each fault takes a thousand times the memory of what a server sends."""
    with pytest.raises(ValidationError) as fault:
        TypeAdapter(Clients, config=ConfigDict(strict=True)).validate_python([strange] * 100)
    assert fault.value.error_count() == 1


def test_a_template_is_no_task_until_it_is_filled_in_and_may_lack_fields_in_the_config_of_a_hook() -> None:
    for template in (TrainingSpec(clients=(0,)), TrainingSpec(round=1)):
        with raises(ProtocolError, "protocol.wrong-value"):
            TrainingSpec.from_record(template.to_record())
    config = ConfigRecord({"local_epochs": 3, "server-round": 7, "another-strategys-own": 1})
    assert TrainingSpec.of_config(config) == TrainingSpec(local_epochs=3)
    with raises(ProtocolError, "protocol.wrong-value", "local-epochs"):
        TrainingSpec.of_config(ConfigRecord({"local_epochs": 3.0}))


def test_numbers_are_read_as_they_are_kept() -> None:
    for name in ("step_size", "noise_multiplier", "clip_norm"):
        assert type(getattr(TrainingSpec.from_record(changed(**{name: 2**62})), name)) is float
    # As text a zero and a negative one differ, and a ledger keeps text.
    assert str(task_of(choice_epsilon=-0.0).choice_epsilon) == "0.0"


@pytest.mark.parametrize("unit", ["layer", "row"])
def test_a_public_clip_norm_is_of_the_whole_vector(unit: str) -> None:
    for clipping, noise_per in (("update", unit), ("public", "vector")):
        TrainingSpec(1, (0,), 1, 0.1, 10, 5.0, clipping=clipping, noise_per=noise_per)
    with raises(ProtocolError, "protocol.noise-per-clipping", unit):
        TrainingSpec(1, (0,), 1, 0.1, 10, 5.0, clipping="public", noise_per=unit)


shares = st.just((-1, -1)) | st.integers(1, 9).flatmap(lambda step: st.tuples(st.integers(0, step - 1), st.just(step)))


@given(train=st.integers(0, 2**31), validation=st.integers(0, 2**31), share=shares)
def test_hosting_arrives_as_it_was_sent(train: int, validation: int, share: tuple[int, int]) -> None:
    hosting = Hosting(train, validation, *share)
    assert hosting_in(over_the_wire(hosting_reply(hosting))) == hosting


@pytest.mark.parametrize(
    ("changes", "code", "part"),
    [
        *(({"version": version}, "version", version) for version in (VERSION - 1, VERSION + 1, None)),
        *(({name: value}, "hosting", name) for name, value in (
            ("train", -1), ("validation", -1), ("train", 3.0), ("train", [3]), ("step", None), ("first", 0.0),
        )),
        *(({"first": first, "step": step}, "hosting", "")
          for first, step in ((0, 0), (0, -7), (-1, 2), (3, 3), (-1, 1))),
    ],
)  # fmt: skip
def test_hosting_that_cannot_be_is_refused(changes: dict[str, Any], code: str, part: object) -> None:
    values = {name: value for name, value in {**Hosting(3, 1).to_record(), **changes}.items() if value is not None}
    with raises(ProtocolError, f"protocol.{code}", part):
        Hosting.from_record(MetricRecord(values))


ROWS = {"row_clip_norm": 1.0, "row_noise_multiplier": 1.0, "row_rate": 0.1, "row_batch": 10.0}


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        *(({name: 0.0}, "wrong-value") for name in ROWS),
        ({"row_rate": 1.01}, "wrong-value"),
        ({"row_rate": -0.1}, "wrong-value"),
        ({"row_clip_norm": float("inf")}, "wrong-value"),
        ({"row_clip_norm": 1.001e6}, "wrong-value"),
        ({"row_clip_norm": 0.999e-6}, "wrong-value"),
        ({"row_rate": 0.999e-9, "local_steps": 1}, "wrong-value"),
        ({"row_rate": 1e-9}, "rows"),  # of an epoch, which has too many steps
        ({"local_epochs": 0}, "rows"),
        ({"message_noise": 1.0}, "rows"),
        ({"release_by": "site", "noise_multiplier": 0.0}, "rows"),
        ({"release_by": "secure", "noise_multiplier": 0.0, "mechanism": "discrete-gaussian"}, "rows"),
    ],
)
def test_a_task_whose_rows_would_have_no_guarantee_is_none(changes: dict[str, Any], code: str) -> None:
    with raises(ProtocolError, f"protocol.{code}"):
        TrainingSpec(**(ROWS | changes))


def test_a_task_says_how_its_clients_hide_rows_up_to_the_limits() -> None:
    assert TrainingSpec().row_privacy is None
    arrived = TrainingSpec.from_record(changed(TRAINING, **ROWS, local_epochs=2, local_steps=0))
    assert arrived.row_privacy == RowPrivacy(1.0, 1.0, 0.1, 10.0, 20)
    TrainingSpec(**ROWS, release_by=ReleaseBy.SITE)  # its sums get noise
    for changes in ({"row_clip_norm": 1e6}, {"row_clip_norm": 1e-6}, {"row_rate": 1e-9}):
        assert TrainingSpec(**(ROWS | {"local_steps": 1} | changes)).row_privacy
    assert [Hosting(3, 1, first=0, step=2).simulated, Hosting(3, 1).simulated] == [True, False]
