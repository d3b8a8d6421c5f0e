"""What a server asks of a node's clients: an example of each kind, and any that can be."""

from __future__ import annotations

from typing import Any

from flwr.app import RecordDict
from hypothesis import strategies as st

from umbel.protocol.messages import round_request
from umbel.protocol.records import pack
from umbel.protocol.tasks import EvaluationSpec, TrainingSpec

from .records import STACKED

TRAINING = TrainingSpec(
    round=3, clients=(0, 2, 5), local_epochs=1, step_size=0.1, batch_size=10, noise_multiplier=5.0, clip_norm=0.5
)
EVALUATION = EvaluationSpec(round=3, clients=(7, 3))


def request(training: TrainingSpec | None = None, evaluation: EvaluationSpec | None = None) -> RecordDict:
    """Return the content of a round's message that has `STACKED` for hypotheses."""
    return round_request(pack(STACKED), training, evaluation)


_whole = st.integers(0, 2**31)
_positive = st.floats(0, exclude_min=True, allow_infinity=False)
# Noise on layers or rows by themselves works only with clipping update.
_modes = st.sampled_from([("update", "vector"), ("update", "layer"), ("update", "row"), ("public", "vector")])
_who: dict[str, Any] = {
    "clients": st.lists(_whole, min_size=1, max_size=20, unique=True).map(tuple),
    "step_size": _positive,
    "run": st.text(max_size=200),
    "frozen_digest": st.text(max_size=64),
}

trainings = st.builds(
    lambda mode, **fields: TrainingSpec(clipping=mode[0], noise_per=mode[1], **fields),
    mode=_modes,
    round=st.integers(1, 2**31),
    local_epochs=_whole,
    local_steps=_whole,
    message_noise=st.floats(0, allow_infinity=False),
    batch_size=_whole,
    noise_multiplier=st.floats(0, allow_infinity=False),
    clip_norm=_positive,
    disclose_choice=st.booleans(),
    **_who,
)
evaluations = st.builds(EvaluationSpec, round=_whole, **_who)
