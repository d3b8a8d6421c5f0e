"""What a real browser makes of a report: on a phone and on a desk, light and dark.

Chromium or Chrome must be there. Where ``node_modules/axe-core`` is as well (``npm install --no-save axe-core``),
axe looks at the page too.
"""

from __future__ import annotations

import html as entities
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.reports import CONFIG, WORTH, entry, report, state
from tests.helpers.sources import ROOT

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None)
AXE = ROOT / "node_modules" / "axe-core" / "axe.min.js"
pytestmark = [
    pytest.mark.rest,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium or Chrome on this machine"),
]

# A phone and a desk; then the narrowest phone, and the narrowest window with two columns.
LOOKS = [(390, "light"), (390, "dark"), (1440, "light"), (1440, "dark"), (320, "light"), (760, "dark")]
THEMES = {"light": 1, "dark": 0}  # as Chromium calls them
SMALLEST_TEXT = 11
CONTRAST = 4.5  # WCAG 2.2, AA
PROBE = (Path(__file__).parent / "probe.js").read_text(encoding="utf-8")
# A window is at least 500 wide, a frame in it as wide as one likes.
FRAME = """<!doctype html><meta name="color-scheme" content="light dark"><title></title>
<body style="margin: 0"><script>
addEventListener("message", event => { document.title = event.data; });
</script><iframe src="probe.html" width="%d" height="4000" style="border: 0"></iframe>"""


def chromium(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM
    return subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
            f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", *options,
        ],
        capture_output=True, text=True, check=True, timeout=900, cwd=folder,
    )  # fmt: skip


@pytest.fixture(scope="module")
def wide() -> str:
    """A report with all that there is: seven hypotheses, an alarm, long names and a large table."""
    rng = np.random.default_rng(0)
    best = {"weight": rng.normal(size=(7, 1, 2)).astype(np.float32)}
    history = [
        entry(t, loss=float(rng.random()) + 1 / t, groups=[*rng.multinomial(100, [1 / 6] * 6).tolist(), 0], asked=100,
              nearest=rng.random(7).tolist(), lost_nodes=int(t == 3), loss_spread=sorted((rng.random(5) * t).tolist()))
        for t in range(1, 101)
    ]  # fmt: skip
    run = state(best=best, hypotheses=best, history=history, best_round=9)
    return report(
        run, hypotheses=7, participations=rng.poisson(25, 500),
        name="20260101-000000-" + "long" * 20, config=CONFIG | {"model": "a.long.package:" + "Name" * 20},
        drawn=True,
        worth=replace(WORTH, arms=[*WORTH.arms, replace(WORTH.arms[0], label="long " * 20, remark="why " * 60)]),
    ).html  # fmt: skip


@pytest.fixture(scope="module")
def guaranteed() -> str:
    """A report of a run with a guarantee, in dollars and without an alarm."""
    return report(mode="public", noise=400.0, choice=0.5, drawn=True, worth=replace(WORTH, worth_it=True)).html


def measure(folder: Path, html: str, width: int, theme: str = "light") -> dict[str, Any]:
    """Return what `probe.js` finds of a page in a window of a width; what is folded is unfolded."""
    axe = f"<script>{AXE.read_text(encoding='utf-8')}</script>" if AXE.exists() else ""
    probe = f"{axe}<script>{PROBE}</script></body>"
    # The page allows no script; the probe is one.
    html = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", html)
    (folder / "probe.html").write_text(html.replace("</body>", probe), encoding="utf-8")
    (folder / "frame.html").write_text(FRAME % width, encoding="utf-8")
    done = chromium(
        folder, f"--window-size={max(width, 500)},4000", f"--blink-settings=preferredColorScheme={THEMES[theme]}",
        "--virtual-time-budget=60000", "--dump-dom", f"file://{folder / 'frame.html'}",
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr, "the browser complains"
    title = re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL)
    assert title
    measured: dict[str, Any] = json.loads(entities.unescape(title[1]))
    return measured


@pytest.mark.parametrize(
    ("page", "width", "theme"), [*(("wide", *look) for look in LOOKS), ("guaranteed", 390, "dark")]
)
def test_everything_can_be_read(
    tmp_path: Path, page: str, width: int, theme: str, request: pytest.FixtureRequest
) -> None:
    found = measure(tmp_path, request.getfixturevalue(page), width, theme)
    assert (found["width"], found["dark"]) == (width, theme == "dark")
    assert found["overflow"] <= 0, "the page is wider than its window"
    size, words = found["smallest"]
    assert size >= SMALLEST_TEXT, words
    ratio, words = found["faintest"]
    assert ratio >= CONTRAST, words
    assert found["overlaps"] == []
    for name, left, right, spill in found["figures"]:
        assert 0 <= left < right, name
        assert spill < 2, f"{name}: a text leaves its figure"
    if page == "wide":
        assert found["texts"] > 800, "all texts are looked at"
        assert len(found["figures"]) == 5
    assert found["axe"] in (None, [])


def test_the_probe_sees_what_is_wrong(tmp_path: Path) -> None:
    """Text of 5 pixels, light grey on white, with other text over it, and an SVG that is scaled to half its size."""
    html = """<!doctype html><html lang="en"><title>x</title><body style="margin: 0; background: #fff"><main>
    <h1>Large</h1><p style="font-size: 5px; color: #bbb; margin: 0">small and faint</p>
    <p style="position: absolute; top: 20px; left: 0">over it</p>
    <figure><svg aria-label="half" role="img" viewBox="0 0 1000 100" style="width: 500px"><text y="50"
    style="font-size: 16px; fill: #000">scaled</text><text x="990" y="90" style="font-size: 40px">out</text></svg>
    </figure></main></body>"""
    found = measure(tmp_path, html, 600)
    assert found["smallest"] == [5, "small and faint"]
    assert found["faintest"][0] == pytest.approx(1.92, abs=0.01)
    assert ["Large", "over it"] in found["overlaps"]
    assert found["figures"][0][3] > 2
    small = measure(tmp_path, html.replace("font-size: 5px; color: #bbb", "font-size: 20px"), 600)
    assert small["smallest"] == [8, "scaled"]
    assert small["faintest"][0] == pytest.approx(21)
