"""Reports of hand-made runs, as a reader of their HTML sees them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

from tests.helpers.drawing import leave_blank
from tests.helpers.history import a_round
from umbel import models
from umbel.data import Manifest
from umbel.privacy.accounting.guarantee import site_release
from umbel.protocol.release import Clipping, Kind, Release, RowPrivacy
from umbel.server.history import Round, State
from umbel.server.report import View, render
from umbel.server.summary import Summary
from umbel.server.worth import Arm, LeftOut, Way, Worth

SYNTHETIC = Manifest(name="synthetic", clients=7, split={"train": 4, "validation": 3}, truth=[[5.0, 6.0], [4.0, -4.5]])
HOSPITAL = Manifest(
    name="hospital", clients=7, split={"train": 4, "validation": 3},
    units={"target": {"name": "payment", "unit": "dollars", "scale": 10_000}},
)  # fmt: skip
CONFIG = {
    "strategy": "group-privacy", "noise-multiplier": 5.0, "seed": 3, "validation": "clients=0 every=1 by=mean",
    "model": "",
}  # fmt: skip
VERSIONS = {"flwr": "1.42.0", "python": "3.11.7"}
# Four training clients, who took part so often: the median is 2, and at 2/5 each the paper's budget .8 and at most 2.
PARTICIPATIONS = np.array([0, 1, 3, 5])
WORTH = Worth(
    metric="RMSE",
    unit="dollars",
    higher_is_better=False,
    clients=12,
    arms=[Arm(Way.CONSTANT, "the best constant", 1391.9, 3934.0, "the mean"), Arm(Way.LAST, "this run", None, None)],
    left_out=[LeftOut("each client alone", "since its network is too large for so many rows")],
    worth_it=False,
    verdict="Diverged.",
    history=4,
)
VOID = {"meta", "br", "link", "img", "input", "hr", "base", "source", "embed"}


class Page(HTMLParser):
    """What a page says and what it is made of."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.words: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == [], "every tag is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another tag"

    def handle_data(self, data: str) -> None:
        if not {"style", "svg"} & set(self.open):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def of(self, tag: str) -> list[dict[str, str]]:
        return [attrs for name, attrs in self.tags if name == tag]


def entry(number: int, **changes: Any) -> Round:
    """A round in which all ten clients released and the hypotheses became better than ever."""
    loss = 1 / (number + 1)
    values = {"loss": loss, "metric": loss, "nearest": [5.0, 5.0], "best_round": number}
    return a_round(number, **values | {"median_participations": 1.0, "max_participations": 2} | changes)


def state(rounds: int = 20, final: bool = True, **changes: Any) -> State:
    """A run in which the loss after t rounds is 1 / (t + 1); that after the last is unknown unless `final`."""
    history = [entry(t) for t in range(rounds + 1)]
    if not final:
        history[-1] = replace(history[-1], loss=None, metric=None)
    best = {"weight": np.array([[[5.0, 6.5]], [[4.0, -4.0]]], np.float32)}
    values: dict[str, Any] = {
        "hypotheses": best,
        "best": best,
        "best_loss": 1 / (rounds + 1),
        "best_round": rounds,
        "history": history,
        "stopped": f"all {rounds} rounds done",
    }
    return State(**values | changes)


def report(run: State | None = None, *, drawn: bool = False, **of: Any) -> Page:
    """Return the page of a run, of which `view` says more; most tests look at words, and drawing takes the time."""
    one = view(run, **of)
    with pytest.MonkeyPatch.context() as patch:
        if not drawn:
            leave_blank(patch)
        return Page(render(one, VERSIONS))


def view(
    run: State | None = None, *, model: str = "linear", manifest: Manifest | None = SYNTHETIC, noise: float = 5.0,
    mode: str = "update", mechanism: str = "laplace", hypotheses: int = 2, choice: float = 0.0, by_site: bool = False,
    participations: Any = PARTICIPATIONS, config: dict[str, Any] = CONFIG, name: str = "a-run",
    worth: Worth | None = None, rows: RowPrivacy | None = None, planned: int = 0, before: Release | None = None,
) -> View:  # fmt: skip
    """Return what a report is made from."""
    network = models.load(model)
    chosen: dict[str, Any] = {"mechanism": mechanism, "hypotheses": hypotheses, "choice_epsilon": choice}
    release = Release(Kind.TRAIN, network.num_parameters, noise, Clipping(mode), **chosen).trained_by(rows)
    told = Summary(network, manifest, site_release(release) if by_site else release, rounds=planned, before=before)
    return View(name, told, run or state(), np.asarray(participations), config | {"noise-multiplier": noise}, worth)


@cache
def plain() -> Page:
    return report()


@cache
def full() -> Page:
    return report(drawn=True)
