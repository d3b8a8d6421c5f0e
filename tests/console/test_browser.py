"""The console in a browser: read at two widths, and used with the keyboard alone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

from tests.cli.commands.test_approvals import Site
from tests.console.conftest import books
from tests.server.report.test_browser import CHROMIUM, CONTRAST, SMALLEST_TEXT, measure
from umbel.console.page import render
from umbel.privacy.gate.runs import Runs, Status
from umbel.simulation.superlink import free_port

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
    found = measure(tmp_path, render(books(site), "token", "told"), width, theme)
    assert (found["width"], found["dark"]) == (width, theme == "dark")
    assert found["overflow"] <= 0, "the page is wider than its window"
    assert found["texts"] > 100
    size, words = found["smallest"]
    assert size >= SMALLEST_TEXT, words
    ratio, words = found["faintest"]
    assert ratio >= CONTRAST, words
    assert found["overlaps"] == []
    assert found["axe"] in (None, [])


class Page:
    """A page of a browser, driven by its debugging protocol."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._number = socket, 0

    def do(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            answer = json.loads(self._socket.recv())
            if answer.get("id") == self._number:
                result: dict[str, Any] = answer["result"]
                return result

    def loaded(self) -> None:
        while json.loads(self._socket.recv()).get("method") != "Page.loadEventFired":
            pass

    def press(self, key: str, code: int, text: str = "") -> None:
        for kind in ("keyDown", "keyUp"):
            self.do("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, text=text)

    def tab_to(self, name: str) -> None:
        for _ in range(40):
            self.press("Tab", 9)
            at = "(document.activeElement.name || '') + (document.activeElement.value || '')"
            if self.value(at).startswith(name):
                return
        raise AssertionError(f"Tab does not lead to {name}")

    def value(self, expression: str) -> Any:
        return self.do("Runtime.evaluate", expression=expression)["result"].get("value")


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    assert CHROMIUM
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0"]
    running = subprocess.Popen(
        [CHROMIUM, *options, f"--user-data-dir={folder / 'browser'}", "about:blank"], stderr=subprocess.PIPE, text=True
    )
    try:
        assert running.stderr
        place = next(found for line in running.stderr if (found := re.search(r"ws://127.0.0.1:(\d+)/", line)))
        with connect(f"ws://127.0.0.1:{place[1]}{place.string.strip().partition(place[1])[2]}") as whole:
            target = Page(whole).do("Target.createTarget", url="about:blank")["targetId"]
        with connect(f"ws://127.0.0.1:{place[1]}/devtools/page/{target}") as socket:
            page = Page(socket)
            page.do("Page.enable")
            yield page
    finally:
        running.terminate()
        running.wait()


def test_a_person_approves_with_the_keyboard_alone(tmp_path: Path, run_config: dict[str, Any]) -> None:
    site = Site(tmp_path, run_config)
    site.query()
    port = free_port()
    words = f'data-path="{tmp_path / "own"}" ledger-path="{site.ledger}" role="split" approve="ask"'
    command = [sys.executable, "-m", "umbel", "site", "console", words, "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout
            address = running.stdout.readline().strip()
            assert re.fullmatch(rf"http://127\.0\.0\.1:{port}/[\w-]{{43}}/", address)
            with browser(tmp_path) as page:
                # The process prints its address just before it listens.
                while "waits" not in str(page.value("document.body.innerText")):
                    page.do("Page.navigate", url=address)
                    page.loaded()
                for field, text in (("person", "Dr. Day"), ("reason", "trial 7")):
                    page.tab_to(field)
                    page.do("Input.insertText", text=text)
                page.tab_to("decisionapprove")
                page.press("Enter", 13, "\r")
                page.loaded()
                assert "is approved" in page.value("document.querySelector('[role=status]').innerText")
        finally:
            running.terminate()
    [request] = Runs(site.ledger).requests()
    assert (request.status, request.person, request.reason) == (Status.APPROVED, "Dr. Day", "trial 7")
