"""The picture in README: bars to scale, words for those who do not see it, and legible in light and dark."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from umbel_lab.experiments import page

pytestmark = pytest.mark.rest

DRAWN = (page.DOCS / "pictures" / "hospital.svg").read_text(encoding="utf-8")
SVG = "{http://www.w3.org/2000/svg}"
KINDS = ("alone", "open", "kept")


def test_bars_are_to_scale_and_told_in_words() -> None:
    drawn = ET.fromstring(DRAWN)
    widths = {
        kind: float(rect.get("width", "")) for rect in drawn.iter(f"{SVG}rect") for kind in [rect.get("class", "")]
    }
    told = drawn.findtext(f"{SVG}desc") or ""
    numbers = [int(number.replace(",", "")) for number in re.findall(r" ([\d,]+\d)(?=[;,.])", told)]
    for kind, mean, worst in zip(KINDS, numbers[::2], numbers[1::2], strict=True):
        assert widths[f"{kind} pale"] / worst == pytest.approx(430 / max(numbers), rel=1e-3)
        assert widths[kind] / mean == pytest.approx(430 / max(numbers), rel=2e-3)
    width = float(drawn.get("viewBox", "").split()[2])
    assert all(float(rect.get("x", 0)) + float(rect.get("width", "")) <= width for rect in drawn.iter(f"{SVG}rect"))


def test_it_loads_nothing_and_runs_nothing() -> None:
    assert not re.search(r"<script|<image|href|url\(|@import|\bon\w+=", DRAWN)
    assert DRAWN.count("http") == 1, "the name of SVG itself"


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours (WCAG 2.1, from 1 to 21)."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_words_and_bars_stand_out_in_light_and_in_dark() -> None:
    light, _, dark = DRAWN.partition("prefers-color-scheme: dark")
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    for half in (light, dark):
        colours = dict(re.findall(r"\.(\w+) { fill: (#[0-9a-f]{6}); }", half))
        assert all(contrast(colours[text], colours["card"]) >= 4.5 for text in ("text", "soft"))
        assert all(contrast(colours[bar], colours["card"]) >= 3 for bar in KINDS)
        # The mean stands on the pale bar: three tenths of the bar's colour on the card's.
        for bar in KINDS:
            mixed = "#" + "".join(
                f"{round(0.3 * int(colours[bar][at : at + 2], 16) + 0.7 * int(colours['card'][at : at + 2], 16)):02x}"
                for at in (1, 3, 5)
            )
            assert contrast(colours["text"], mixed) >= 4.5
