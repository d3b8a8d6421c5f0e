"""The page of a site's books in a browser, read at two widths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands.test_requests import Site
from tests.console.conftest import books
from tests.server.report.test_browser import CHROMIUM, CONTRAST, SMALLEST_TEXT, measure
from umbel.console.page import render

pytestmark = [
    pytest.mark.rest,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium or Chrome on this machine"),
]


@pytest.mark.parametrize(("width", "theme"), [(390, "light"), (1440, "dark")])
def test_everything_can_be_read(tmp_path: Path, run_config: dict[str, Any], width: int, theme: str) -> None:
    site = Site(tmp_path, run_config)
    site.query()
    site.run("approve", site.waiting[0], "--by", "long name " * 9, "--reason", "w" * 90)
    site.train()
    site.query()
    for context in site.grid.contexts.values():
        context.run_config = run_config | {"strategy": "a.package:" + "Long" * 30}
    site.query()
    found = measure(tmp_path, render(books(site)), width, theme)
    assert (found["width"], found["dark"]) == (width, theme == "dark")
    assert found["overflow"] <= 0, "the page is wider than its window"
    assert found["texts"] > 100
    size, words = found["smallest"]
    assert size >= SMALLEST_TEXT, words
    ratio, words = found["faintest"]
    assert ratio >= CONTRAST, words
    assert found["overlaps"] == []
    assert found["axe"] in (None, [])
