"""Records on their way over the network, and the named arrays in them."""

from __future__ import annotations

import numpy as np
from flwr.app import RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from umbel.protocol.arrays import Arrays

# Two models of 2 x 2 + 1 parameters, as they are stacked in a message.
STACKED: Arrays = {
    "weight": np.array([[[1, 2], [3, 4]], [[6, 7], [8, 9]]], np.float32),
    "bias": np.array([[5], [10]], np.float32),
}


@st.composite
def stacked(draw: st.DrawFn, smallest: int = 1) -> Arrays:
    """Draw named float32 arrays with one common leading axis, some of them scalars behind it."""
    rows = draw(st.integers(smallest, 4))
    shapes = st.lists(st.integers(1, 3), max_size=3)
    number = st.floats(width=32, allow_nan=False)
    names = draw(st.lists(st.sampled_from(["fc.weight", "fc.bias", "scale", "embedding"]), min_size=1, unique=True))
    return {name: draw(hnp.arrays(np.float32, (rows, *draw(shapes)), elements=number)) for name in names}


def over_the_wire(content: RecordDict) -> RecordDict:
    """Return what arrives of a message's content after Flower has turned it into bytes and back."""
    sent = recorddict_to_proto(content).SerializeToString()
    return recorddict_from_proto(ProtoRecordDict.FromString(sent))


def assert_same_arrays(ours: Arrays, theirs: Arrays) -> None:
    """Check that named arrays are equal bit by bit, order and types of numbers included."""
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, strict=True)
