"""The documentation site builds without a warning, works without a network, and has a text for every picture."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.helpers.sources import ROOT

pytestmark = pytest.mark.rest


class Page(HTMLParser):
    """What a page refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.unseen: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if "id" in given:
            self.ids.add(given["id"])
        if tag == "a" and "href" in given:
            self.links.add(given["href"])
        if tag in ("script", "img", "source") and "src" in given:
            self.loaded.add(given["src"])
        if tag == "link" and given.get("rel") in ("stylesheet", "preload", "icon"):
            self.loaded.add(given["href"])
        if tag == "img" and len(given.get("alt", "")) < 10:
            self.unseen.append(given["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it, but for the notebook, which `tests/test_notebook.py` runs."""
    out = tmp_path_factory.mktemp("site")
    said = (ROOT / "Makefile").read_text(encoding="utf-8")
    [words] = re.findall(r"^\t\$\(BIN\)/python (-m sphinx .*) docs/_build/html$", said, re.MULTILINE)
    options = ["-D", "nb_execution_mode=off", "-d", str(out / "doctrees")]
    done = subprocess.run(
        [sys.executable, *words.split(), *options, str(out / "html")],
        cwd=ROOT, check=False, capture_output=True, text=True, env=os.environ | {"NO_COLOR": "1"},
    )  # fmt: skip
    assert "-W" in words.split()
    assert done.returncode == 0, done.stderr
    return out / "html"


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {file: Page(file.read_text(encoding="utf-8")) for file in sorted(site.rglob("*.html"))}


def test_every_local_link_leads_somewhere(site: Path, pages: dict[Path, Page]) -> None:
    assert len(pages) > 50
    for file, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            assert target.exists(), f"{file.relative_to(site)}: {link}"
            if parts.fragment and target in pages and target.name != "genindex.html":
                assert unquote(parts.fragment) in pages[target].ids, f"{file.relative_to(site)}: {link}"


def test_nothing_is_loaded_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    for file, page in pages.items():
        for link in page.loaded:
            parts = urlsplit(link)
            assert parts.scheme + parts.netloc == "", f"{file.relative_to(site)} loads {link}"
            assert (file.parent / unquote(parts.path)).exists(), link
    for style in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?https?:|@import [\"']?https?:", style.read_text(encoding="utf-8")), style


def test_the_search_knows_the_words_of_the_pages(site: Path) -> None:
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    for word in ("epsilon", "ledger", "hypothes", "quorum"):
        assert word in index


def test_every_picture_has_a_text_in_its_place(pages: dict[Path, Page]) -> None:
    assert not [(file.name, picture) for file, page in pages.items() for picture in page.unseen]
