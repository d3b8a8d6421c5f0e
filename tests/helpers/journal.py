"""A site's journal with a line of each kind."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from umbel.privacy.site.charges import Charge
from umbel.privacy.site.entry import Entry
from umbel.privacy.site.journal import Journal, Names, lines_of
from umbel.privacy.site.policy import Policy
from umbel.privacy.site.runs import Runs, Status, digest_of
from umbel.protocol.clients import ClientInDataset
from umbel.protocol.errors import Refused
from umbel.protocol.release import Clipping, Kind, Release

TRAIN = Release(Kind.TRAIN, 11, 3.0, Clipping.PUBLIC)
ROWS = Release(
    Kind.TRAIN, 11, 0.0, Clipping.PUBLIC, mechanism="gaussian", row_noise_multiplier=1.5, row_rate=0.25, row_steps=4
)
SITE = Release(Kind.SITE, 11, 2.0, Clipping.UPDATE, hypotheses=2, choice_epsilon=1.0)
REPORT = Release(Kind.REPORT, 2, 20.0, Clipping.PUBLIC)
DIGEST = "d" * 64
RESULT = {"w": np.zeros((1, 2), np.float32)}
POLICY = Policy.parse({"max-evaluations": 1})


def add_every_kind(path: Path) -> None:
    """Make a journal with a line of each kind: charges, outcomes, people's decisions, a repair."""
    Journal.create(path)
    Names(path).extend([], ["north", "south"])
    runs = Runs(path, node="here", policy="p" * 16)

    def answer(release: Release, *clients: int, round: int = 1, limited: bool = False) -> None:
        entry = Entry("7", "train", {"training": {"round": round, "clients": len(clients)}})
        entry.sent = [("the run", digest_of(RESULT))]
        asked, most = [*map(ClientInDataset, clients)], 9 if limited else math.inf
        entry.charge(sum(runs.charge(Charge("7", round, release), asked, most=most)))
        runs.record(entry, True)

    answer(TRAIN, 0, 1)
    answer(TRAIN, 0, 1, round=2, limited=True)
    answer(ROWS, 0)
    answer(SITE, 1)
    runs.count_evaluation("7", POLICY)
    answer(REPORT, 1)
    refused = Entry("8", "train")
    refused.refuse("training", Refused("too little noise", code="refused.noise"))
    runs.record(refused, False)
    for rounds in range(3):
        with pytest.raises(Refused):
            runs.check_approved("7", {"config": {"rounds": rounds}}, "")
    first, second, _ = (request.digest for request in runs.requests())
    runs.decide(first, Status.APPROVED, "Dr. Day")
    runs.decide(second, Status.REFUSED, "Dr. Day", "too many")
    runs.use_signature("7", DIGEST)
    runs.end("7", "the run", RESULT, evaluates=True)
    # The clients' third number is only in the index, and so a fact that the repair adds.
    before = path.read_bytes()
    Names(path).extend(["north", "south"], [3])
    path.write_bytes(before)
    assert Journal(path, opened=False).repair(POLICY, [])


def keys_of(path: Path) -> dict[str, set[str]]:
    """Return the keys of a journal's lines, of their releases and requests, by the kind of the line."""
    keys = defaultdict[str, set[str]](set)
    for line, _ in lines_of(path):
        inner = {"release": json.loads(line.get("release", "{}")), "request": line.get("request", {})}
        keys[line["kind"]] |= {*line} | {f"{name}.{key}" for name in inner for key in dict(inner[name] or {})}
    return keys
