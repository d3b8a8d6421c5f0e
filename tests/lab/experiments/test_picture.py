"""The picture in README: bars to scale, words for those who do not see it, and nothing that loads or runs."""

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
    assert not re.search(r"<script|<image|href|url\(|@import|\bon\w+=", DRAWN)
    width = float(drawn.get("viewBox", "").split()[2])
    assert all(float(rect.get("x", 0)) + float(rect.get("width", "")) <= width for rect in drawn.iter(f"{SVG}rect"))
