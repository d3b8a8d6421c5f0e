"""Hostile messages to sites with data of their own, through the real ClientApp.

Each is an honest message with parts changed, left out, doubled or made up, drawn from a seed. Whatever
comes: the reply is one word or well-formed, each number of a training client in it went through the
mechanism with the site's own noise, and the ledger holds at least what was released.

``FUZZ_MESSAGES=100000`` sends so many; by default there are 720, to each kind of site.
"""

from __future__ import annotations

import logging
import math
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from tests.helpers.datasets import save_plane
from tests.helpers.hostile import NO_MODEL, UNREADABLE, matrix
from tests.helpers.ledgers import spent
from tests.helpers.messages import arrived, asked, refused, releases, sent
from tests.helpers.nodes import ask
from tests.helpers.paper import paper_run
from umbel.client.app import app
from umbel.privacy.accounting.guarantee import within_budget
from umbel.privacy.mechanisms import Mechanism
from umbel.privacy.mechanisms import sanitise as mechanism
from umbel.privacy.site.journal import Journal
from umbel.protocol.messages import PARTS, keep_request, query
from umbel.protocol.records import pack, unpack
from umbel.protocol.release import CHANNELS, Clipping
from umbel.protocol.tasks import EvaluationSpec, TrainingSpec
from umbel.simulation.grid import InProcessGrid

MESSAGES = int(os.environ.get("FUZZ_MESSAGES", "720"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))
BLOCK = 80  # messages to a site before another takes its place: a ledger is read whole each time
CLIENTS, TRAIN = 6, 4
SECRET = "patient-17"  # in every path and every text of the site's own
RECORDS = (*PARTS, *CHANNELS, "arrays", "released", "")

SITES: dict[str, dict[str, Any]] = {
    "default": {},
    "limits": {"role": "split", "paper-budget": 25.0, "max-participations": 20},
    "public": {"clipping": "public", "min-noise-multiplier": 2.5, "max-hypotheses": 2},
    "private": {
        "clipping": "public", "mechanisms": "laplace gaussian", "max-choice-epsilon": 1.0,
        "budget": "40 delta=1e-5",
    },
    "reports": {"reports": "noise=2.0 bound=3.0", "max-participations": 60},
    "validation": {"role": "validation", "max-evaluations": 40},
    "keeps": {"role": "split", "keep-model": "{folder}/models"},
    "place": {"role": "split", "place": "1/3"},
}  # fmt: skip
NUMBERS: list[Any] = [
    0, 1, 2, 3, -1, 7, 2**31, 2**31 + 1, 2**63 - 1, -(2**63), 0.0, -0.0, 1.0, 0.5, 1e-300, 5e-324, 1e300, 1e308,
    -1e308, math.nan, math.inf, -math.inf, 0.999999, 3.0, 1e6,
]  # fmt: skip
VALUES: list[Any] = [
    *NUMBERS, True, False, "", "update", "public", "row", "layer", "vector", "../..", "\0", "ü" * 300, b"", b"\xff" * 9,
    [], [0], [1, 2, 3], [0, 0], [-1], [2**62], list(range(3000)), [0.5], ["0"], [True], [b""],
]  # fmt: skip
CLIENT_LISTS: list[list[int]] = [
    [0], [1], [0, 1], [2, 3], [3, 2, 1, 0], [4], [4, 5], [0, 4], [5, 0], [6], [-1], [0, 0], [2**40], list(range(6)),
]  # fmt: skip
RUN_CONFIGS: list[dict[str, Any]] = [
    {"dataset": "/etc"}, {"model": "mlp"}, {"local": "*"}, {"frozen": "weight"}, {"device": "cuda"}, {"seed": -1},
    {"noise-multiplier": 0.0}, {"hypotheses": 10**9}, {"data-path": 1}, {"step-size": 1e308},
]  # fmt: skip


@dataclass
class Watched:
    """A site, how often each client released, and for how much altogether.

    For the message that is answered, `noised` is what went through the mechanism: rows, noise multiplier, radius, mode.
    """

    name: str
    folder: Path
    config: dict[str, Any]
    grid: InProcessGrid
    released: Counter[int] = field(default_factory=Counter)
    prices: dict[int, Fraction] = field(default_factory=dict)
    noised: list[tuple[int, float, float, Clipping]] = field(default_factory=list)

    @classmethod
    def open(cls, name: str, folder: Path) -> Watched:
        """Make a site's data and start its node."""
        save_plane(folder / SECRET, TRAIN, CLIENTS - TRAIN, loss="mse", provenance=SECRET)
        policy = {key: str(value).format(folder=folder) for key, value in SITES[name].items()}
        config = {"max-work": "epochs=3 steps=4", "data-path": str(folder / SECRET)}
        config |= {"ledger-path": str(Journal.create(folder / "ledger.jsonl").path)} | policy
        return cls(name, folder, config, InProcessGrid(app, paper_run(), node_configs=[config]))

    def check(self, message: Message, reply: Message) -> str:
        """Check a reply, count what left, and return what kind of reply it was."""
        kind = message.metadata.message_type
        assert SECRET not in repr(reply)
        if reply.has_error():
            assert not reply.has_content()
            assert not self.noised or kind in ("train", "evaluate"), "only what fails after the charge draws noise"
            if kind in ("query", "query.channel", "query.keep", "train", "evaluate"):
                assert refused(reply), reply.error.reason
                return "refused"
            return "unknown"
        reply = arrived(reply)
        content, noised = reply.content, list(self.noised)
        if "arrays" in content:
            self._check_releases(message, reply, *noised.pop(0))
        if "scores" in content:
            self._check_scores(message, content.metric_records["scores"], noised)
        assert not noised
        if kind == "query":
            assert set(content) == {"hosting"}
            assert set(content.metric_records["hosting"]) == {"version", "train", "validation", "first", "step"}
        elif kind == "query.keep":
            assert not content
        else:
            assert kind in ("train", "evaluate")
            assert set(content) in ({"arrays", "released"}, {"scores"}, {"arrays", "released", "scores"})
        return "+".join(content) or "kept"

    def _check_releases(
        self, message: Message, reply: Message, rows: int, nu: float, radius: float, mode: Clipping
    ) -> None:
        assert self.name != "validation"
        assert nu >= float(self.config.get("min-noise-multiplier", 1.0))
        assert radius >= 0.01
        task: Any = message.content["training"]
        flags: Any = reply.content.metric_records["released"]["clients"]
        assert {"clients"} <= set(reply.content.metric_records["released"]) <= {"clients", "step"}
        assert len(flags) == len(task["clients"])
        assert set(flags) <= {0, 1}
        assert rows == sum(flags) > 0, "each row that leaves went through the mechanism"
        [(name, value)] = releases(reply).items()
        assert (name, value.dtype, value.shape) == ("weight", np.float32, (rows, 1, 2))
        assert np.isfinite(value).all()
        assert str(mode) == task["clipping"]
        for client, flag in zip(task["clients"], flags, strict=True):
            self._count(client, Fraction(2) / Fraction(nu), flag)

    def _check_scores(
        self, message: Message, scores: MetricRecord, noised: list[tuple[int, float, float, Clipping]]
    ) -> None:
        asked_of: Any = message.content["evaluation"]["clients"]  # type: ignore[index, call-overload]
        assert set(scores) == {"loss", "metric", *(["noise-multiplier", "bound"] if self.name == "reports" else [])}
        values = np.array([scores["loss"], scores["metric"]], np.float64)
        assert values.shape == (2, len(asked_of))
        if self.name == "reports":
            rows, nu, radius, _ = noised.pop(0)
            there = np.isfinite(values).all(axis=0)
            assert rows == there.sum()
            assert (nu, radius) == (2.0, math.sqrt(2) * 3.0)
            for client, flag in zip(asked_of, there.tolist(), strict=True):
                self._count(client - CLIENTS, Fraction(1), flag)
        else:
            assert self.config.get("role") in ("split", "validation"), "training clients tell no loss"
            first = {"validation": 0, "place": 1}.get(self.name, TRAIN)
            assert min(asked_of) >= first

    def _count(self, client: int, price: Fraction, flag: int) -> None:
        number = 1 + 3 * client if self.name == "place" else client
        self.released[number] += int(flag)
        self.prices[number] = self.prices.get(number, Fraction(0)) + price * int(flag)

    def check_books(self) -> None:
        """Check that the ledger holds at least what left, and no more than the limits; and what lies on disk."""
        times: Counter[int] = Counter()
        ledger = Journal(self.folder / "ledger.jsonl")
        for row in ledger.rows():
            times[int(str(row["client"]))] += 1
        for client, released in self.released.items():
            assert times[client] >= released
            assert spent(ledger, client) >= self.prices[client]
        assert max(times.values(), default=0) <= float(self.config.get("max-participations", math.inf))
        assert max((spent(ledger, client) for client in times), default=0) <= float(
            self.config.get("paper-budget", math.inf)
        )
        for account in ledger.accounts().values():
            assert all(release.noise_multiplier > 0 for release in account), "nobody released without noise"
            if self.name == "private":
                assert all(release.choice_epsilon <= 1 for release in account)
                assert within_budget(account, Fraction(40), 1e-5, 1.0, 1.0)
        for file in (self.folder / "models").glob("*"):
            assert all(np.isfinite(value).all() for value in safetensors.numpy.load_file(file).values())
        known = {SECRET, "models", "ledger.index", *(path.name for path in self.folder.glob("ledger.jsonl*"))}
        assert {path.name for path in self.folder.iterdir()} <= known


class Attacker:
    """Draws messages from a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._before: list[tuple[str, RecordDict]] = []

    def message(self, site: Watched) -> tuple[str, RecordDict]:
        """Return the type and content of a message: some are sent again."""
        if self._before and self.random.random() < 0.1:
            return self.random.choice(self._before)
        kind = self.random.choices(
            ["train", "evaluate", "query.keep", "query", "train.steal", "query.channel", "evaluate.all"],
            [50, 25, 8, 5, 1, 1, 1],
        )[0]
        content = self._honest(kind, site)
        for _ in range(self.random.choice([0, 0, 1, 1, 1, 2, 2, 3, 5])):
            with suppress(Exception):  # what Flower itself cannot hold, it cannot send
                self._change(content)
        self._before = [*self._before, (kind, content)][-20:]
        return kind, content

    def _honest(self, kind: str, site: Watched) -> RecordDict:
        pick = self.random.choice
        k = pick([1, 2, 2, 3])
        rng = np.random.default_rng(self.random.getrandbits(32))
        hypotheses = {"weight": (pick([1, 1, 100]) * rng.standard_normal((k, 1, 2))).astype(np.float32)}
        if kind.startswith("query.k"):
            return keep_request(pack(hypotheses), pick(["", "spring", "summer"]))
        if kind == "query":
            return query()
        run, number = pick(["", "spring", "summer"]), pick([1, 1, 2, 3])
        training = TrainingSpec(
            round=number,
            clients=tuple(self._clients(range(TRAIN))),
            local_epochs=pick([0, 1, 2, 3]),
            step_size=pick([0.01, 0.5, 1e30]),
            batch_size=pick([0, 1, 2, 10**6]),
            noise_multiplier=pick([1.0, 3.0, 1e3]),
            clipping=pick([Clipping.UPDATE, Clipping.PUBLIC]),
            clip_norm=pick([1e-9, 0.1, 1e6]),
            local_steps=pick([0, 0, 4]),
            message_noise=pick([0.0, 0.0, 1.0]),
            mechanism=pick(["laplace", "laplace", "gaussian"]),
            choice_epsilon=pick([0.0, 0.0, 0.5, 1.0, 3.0]),
            run=run,
        )
        reporting = {"validation": range(CLIENTS), "reports": range(CLIENTS, 2 * CLIENTS), "place": range(1, 2)}
        evaluation = EvaluationSpec(
            number, tuple(self._clients(reporting.get(site.name, range(TRAIN, CLIENTS)))), run=run
        )
        parts = pick([(training, None), (training, evaluation), (None, evaluation)])
        return asked(hypotheses, *parts)

    def _clients(self, there: Sequence[int]) -> list[int]:
        return sorted(self.random.sample(list(there), self.random.randint(1, len(there))))

    def _change(self, content: RecordDict) -> None:
        pick: Callable[[Sequence[Any]], Any] = self.random.choice
        tasks = [record for record in content.values() if isinstance(record, ConfigRecord)]
        arrays = [record for record in content.values() if isinstance(record, ArrayRecord)]
        if tasks and self.random.random() < 0.6:
            record = pick(tasks)
            name, what = pick([*record, "sneak"]), self.random.random()
            if what < 0.1:
                del record[name]
            elif name == "clients" and what < 0.7:
                record[name] = pick(CLIENT_LISTS)
            else:
                record[name] = pick(NUMBERS if what < 0.5 else VALUES)
        elif arrays and self.random.random() < 0.7:
            self._change_arrays(pick(arrays))
        else:
            name = pick([*content, *RECORDS])
            if self.random.random() < 0.4:
                content.pop(name, None)
            else:
                one = pack({pick(["weight", "x"]): np.ones((2, 1, 2), np.float32)})
                content[name] = pick(
                    [one, ConfigRecord({"clients": [0]}), MetricRecord({"clients": [1]}), ArrayRecord()]
                )

    def _change_arrays(self, record: ArrayRecord) -> None:
        """Put others in their place: of other sizes, types or names, with odd numbers, or with bytes that are none."""
        pick: Callable[[Sequence[Any]], Any] = self.random.choice
        ((name, array),) = record.items()
        sizes = [*((k, 1, 2) for k in (0, 1, 10, 11, 5000)), (), (2,), (2, 0, 2), (2, 1, 2, 1)]
        [before], data, text = unpack(record).values(), bytearray(array.data), bytearray(name.encode())
        value = before.reshape(-1, 1, 2).copy()
        value.flat[self.random.randrange(value.size)] = pick([math.nan, math.inf, 3.4e38, -3.4e38, 1e-45])
        data[self.random.randrange(len(data))] = self.random.randrange(256)
        text[self.random.randrange(len(text))] = pick(b'0123456789{}[]",:wx')
        changed = pick(
            [
                sent({"weight": np.ones(pick(sizes), np.float32)}),
                sent({"weight": np.full((2, 1, 2), pick(NUMBERS), pick([np.float64, np.float16, bool]))}),
                sent({pick(["weight", "bias", "items", "\0"]): value.astype(pick([">f4", "<f4"]))}),
                sent({"weight": value, "bias": value}),
                matrix(pick([*UNREADABLE.values(), *NO_MODEL.values()])),
                {text.decode(): array},
                {name: Array(array.dtype, array.shape, array.stype, bytes(data))},
                {name: Array("object", pick([(), (10**9, 10**9)]), pick(["torch", ""]), array.data)},
            ]
        )
        record.clear()
        record.update(changed)


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, int], Watched]]:
    """Sites, whose mechanism is looked at."""
    sites: list[Watched] = []
    sanitise = mechanism.sanitise_in_place

    def look(noise: Mechanism | None, updates: Any, radius: float, mode: Clipping, *rest: Any) -> None:
        assert np.isfinite(updates).all()
        assert noise is not None
        sanitise(noise, updates, radius, mode, *rest)
        sites[-1].noised.append((len(updates), noise.noise_multiplier, radius, mode))

    def open_site(name: str, number: int) -> Watched:
        sites.append(Watched.open(name, tmp_path / f"{name}-{number}"))
        return sites[-1]

    monkeypatch.setattr(mechanism, "sanitise_in_place", look)  # of reports as well
    flower = logging.getLogger("flwr")
    level = flower.level
    flower.setLevel(logging.CRITICAL + 1)
    yield open_site
    flower.setLevel(level)


@pytest.mark.slow
def test_no_message_gets_more_than_the_policy_gives(watched: Callable[[str, int], Watched]) -> None:
    names = list(SITES)
    seen: Counter[str] = Counter()
    for number in range(math.ceil(MESSAGES / BLOCK)):
        site = watched(names[number % len(names)], number)
        attacker = Attacker(SEED * 10**6 + number)
        [node], [context] = site.grid.get_node_ids(), site.grid.contexts.values()
        for _ in range(min(BLOCK, MESSAGES - number * BLOCK)):
            kind, content = attacker.message(site)
            context.run_id = attacker.random.choice([1, 1, 1, 2])
            context.run_config = paper_run() | attacker.random.choice([*RUN_CONFIGS, *[{}] * 90])
            site.noised.clear()
            message = Message(content, node, kind)
            [reply] = site.grid.send_and_receive([message])
            seen[site.check(message, reply)] += 1
        site.check_books()
        context.run_config = paper_run()
        assert not ask(site.grid, query(), "query").has_error(), "the site goes on serving"
    assert sum(seen.values()) == MESSAGES
    if len(SITES) * BLOCK <= MESSAGES:
        # The messages are not all so wild that nothing is ever answered.
        assert min(seen[kind] for kind in ("refused", "arrays+released", "scores", "hosting", "kept", "unknown")) > 0
        assert seen["refused"] < 0.95 * MESSAGES
