"""Limits and defaults that pages name are those of the code; other tests see what happens at them."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest

from tests.helpers.sources import ROOT
from umbel.cli.commands.config import _sign
from umbel.client import dp_sgd
from umbel.client.personal.auto import CLASS_PREFERENCES, PREFERENCES
from umbel.client.row_gradients import SLACK
from umbel.deploy import certs, flower, guard
from umbel.nodes import transport
from umbel.privacy.accounting.guarantee import guarantee
from umbel.privacy.channels import client as channel
from umbel.privacy.mechanisms.sanitise import NOISE_STEPS
from umbel.privacy.site import runs
from umbel.privacy.site.policy import Policy
from umbel.protocol import home, presence, words
from umbel.protocol.release import Clipping, Kind, Release
from umbel.protocol.run_config import RunConfig
from umbel.protocol.tasks import LEAST_ROW_RATE, ROW_CLIP_NORMS
from umbel.simulation.baselines import LOCAL_EPOCHS
from umbel.simulation.client_planner import DROWNED
from umbel.simulation.client_planner import SMALL as FEW_PARAMETERS
from umbel.simulation.worth import _FEWEST, _STARTS, MOST_CLIENTS, SMALL, SMALLER
from umbel_lab.attacks.defences import probes, report


def default(name: str) -> Any:
    """Return the default of a site's policy."""
    return Policy.model_fields[name].default


def option(command: Any, name: str) -> Any:
    """Return the default of a command's option."""
    return inspect.signature(command).parameters[name].default


def power(value: float) -> str:
    """Return a power of ten as pages write it."""
    return "10" + raised(round(math.log10(value)))


def raised(value: float) -> str:
    """Return an exponent as pages write it."""
    return f"{value:g}".translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def quickstart(nu: float) -> float:
    """Return the epsilon at delta 1e-5 that a client of examples/quickstart spends in four rounds."""
    release = Release(Kind.TRAIN, 12, nu, Clipping.PUBLIC, mechanism="gaussian", hypotheses=1)
    found = guarantee({release: 4}, 1e-5)
    assert found is not None
    return found.epsilon


RUN, SITES = RunConfig(), "guides/deployment.md"
SQUARED, OTHERS = PREFERENCES, CLASS_PREFERENCES
STEPS = [f"1/{one}" for one in SMALLER[1:]]
SAID: list[tuple[str, str]] = [
    ("how/privacy.md", f"stops at a pure ε of {default('budget').epsilon:g} per client"),
    ("how/privacy.md", f"A run's {default('max_evaluations'):,} losses (`max-evaluations`)"),
    ("how/privacy.md", f"At most {runs._MOST_WAITING} requests wait, of {runs._LONGEST_REQUEST >> 10} KiB each"),
    ("how/privacy.md", f"It ends after {option(_sign, 'days')} days, or `--days`"),
    ("guides/privacy-basics.md", f"a site stops at a pure ε of {default('budget').epsilon:g} for each client"),
    ("guides/gate.md", f"between 0 and its `bound`, by default {default('reports').bound:g}"),
    ("how/guarantee.md", f"Sums of more than {dp_sgd.AT_ONCE} rows are added in 64 bits"),
    ("how/guarantee.md", f"{100 * SLACK:.1f} % of C is left to rounding".removeprefix("0")),
    ("how/guarantee.md", f"C outside {power(ROW_CLIP_NORMS[0])} to {power(ROW_CLIP_NORMS[1])}"),
    ("how/guarantee.md", f"or q below {power(LEAST_ROW_RATE)}, are refused"),
    ("how/guarantee.md", f"until the noise spans at least {NOISE_STEPS} steps"),
    ("how/guarantee.md", f"noise of the whole run is {DROWNED[0]:g} times as long".replace(" 0.", " .")),
    ("how/guarantee.md", f"{DROWNED[1]:g} times with more than {FEW_PARAMETERS:,} parameters"),
    ("guides/epsilon.md", f"From {DROWNED[0]:g} on".replace(" 0.", " .")),
    ("guides/gate.md", f"Each client has then spent an epsilon of {quickstart(2.0):.3f} at a delta of 1e-5"),
    ("guides/gate.md", f"With twice the noise, epsilon is {quickstart(4.0):.2f}"),
    ("guides/strategies.md", f"`calibrate` needs a factor of e^{SQUARED['calibrate']:g}".replace("^0.", "^.")),
    ("guides/strategies.md", f"`no` of e{raised(SQUARED['no'])} and training of e{raised(SQUARED['tuned'])}"),
    ("guides/strategies.md", f"training needs a factor of e{raised(OTHERS['tuned'])} against `no`"),
    ("guides/strategies.md", f"and all else of e{raised(OTHERS['mixture'])}"),
    ("guides/worth.md", f"umbel measures at most {MOST_CLIENTS:,} validation clients"),
    ("guides/worth.md", f"computes more than {SMALL:,} numbers for a row"),
    ("guides/worth.md", {(3, 8): "from up to nine starts until two of at least three"}[_FEWEST, _STARTS]),
    ("guides/worth.md", f"{LOCAL_EPOCHS} epochs at the run's step size, or at {', '.join(STEPS[:-1])} or {STEPS[-1]}"),
    ("guides/hostile.md", {10**6: "by default a million"}.get(RUN.per_node.clients, "?")),
    ("guides/hostile.md", f"By default it is {RUN.per_node.share:g}"),
    ("guides/hostile.md", f"the default is {channel.LARGEST_UPDATE:,.0f}"),
    ("guides/hostile.md", f"cuts text from a request after {words._LONGEST} characters"),
    ("guides/hostile.md", f"a refusal delays a round by up to {presence._LONGEST_PAUSE_S / 60:g} minutes"),
    (SITES, f"`round-timeout` (by default {RUN.round_timeout:g} s"),
    (SITES, {86400: "After `pause` seconds, by default a day"}.get(RUN.wait.pause, "?")),
    (SITES, f"for 1 round, then 3, 7, at most {presence._LONGEST_ABSENCE}"),
    (SITES, f"less than {home.LEAST_ROOM >> 20} MiB left at the server"),
    (SITES, f"Below {home.LAST_ROOM >> 20} MiB, replies wait"),
    (SITES, {365: "The certificate of a server expires after a year,"}.get(certs.SERVER_DAYS, "?")),
    (SITES, {3650: "the CA after ten"}.get(certs.CA_DAYS, "?")),
    (SITES, f"In the last {certs.RENEW_DAYS} days"),
    (SITES, f"| connections | {flower.CONNECTIONS} in total (a site has two)"),
    (SITES, f"{guard._BODY_S / 60:g} minutes for a request's body"),
    (SITES, f"| {guard._LARGEST_BODY >> 20} MiB, or {guard._LARGEST_OBJECT >> 20} MiB for a part"),
    (SITES, f"| {guard._IN_FLIGHT >> 20} MiB in total, {guard._IN_FLIGHT_OF_A_PEER >> 20} MiB per address"),
    (SITES, f"In a request that is no part of a reply, each byte counts as {guard._UNFOLDED}"),
    (SITES, f"| {flower._OBJECTS:,} parts, and {transport._OF_FLOWER >> 10} KiB plus"),
    (SITES, f"plus {transport._OF_A_CLIENT} bytes per client"),
    ("guides/audit.md", {16: "Each of at most sixteen random tests"}.get(probes.TESTS, "?")),
    ("guides/audit.md", f"raises a false alarm in one of {1 / probes.LEVEL:,.0f} audits"),
    ("guides/audit.md", f"over several rounds (`--rounds`, by default {report.ROUNDS})"),
    ("guides/audit.md", f"limits the seconds for one answer, by default {report.Options.timeout:g}."),
]  # fmt: skip


@pytest.mark.parametrize(("page", "said"), SAID)
def test_a_page_names_the_limit_that_holds(page: str, said: str) -> None:
    assert said in " ".join((ROOT / "docs" / page).read_text(encoding="utf-8").split())
