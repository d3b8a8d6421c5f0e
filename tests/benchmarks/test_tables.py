"""The saved tables have the rows that their commands print, and say how and when they were made."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

import benchmarks.__main__ as bench
from benchmarks import parts
from benchmarks.peers.__main__ import OURS
from benchmarks.peers.rivals import PEERS
from benchmarks.peers.tasks import TASKS

PLAYERS = {"hospital": ("bare loop", "umbel"), "cnn": ("bare loop", "umbel", "bare loop, channels last")}
TABLES = Path(__file__).resolve().parents[2] / "benchmarks" / "tables"


def rows(name: str, title: str) -> list[str]:
    """Return the names of the rows in the table of that title, in order."""
    text = (TABLES / f"{name}.txt").read_text(encoding="utf-8")
    _, _, rest = text.partition(f"\n{title}")
    return re.findall(r"^│ (.*?) +│", rest.partition("└")[0], re.MULTILINE)


PEER_ROWS = [*OURS, *(title for peer in PEERS.values() for title, _ in peer.contestants.values())]
EXPECTED: dict[tuple[str, str], Iterable[str]] = {
    ("bench", "Ratios of times"): [*bench.BARE, bench.SITE, bench.FLOWER, bench.MANY, bench.LATE],
    **{
        ("bench", f"{task}:"): [f"{name}, {noise}" for name in PLAYERS[task] for noise in ("nu = 3", "no noise")]
        for task in TASKS
    },
    **{("parts", f"{task}:"): {*parts.PARTS, parts.BETWEEN} for task in TASKS},
    **{("peers", f"{task}:"): PEER_ROWS for task in TASKS},
}


@pytest.mark.parametrize(("name", "title"), EXPECTED)
def test_a_saved_table_has_the_rows_that_its_command_prints(name: str, title: str) -> None:
    names = rows(name, title)
    assert len(names) == len({*names})
    assert {*names} == {*EXPECTED[name, title]}


@pytest.mark.parametrize("table", sorted(TABLES.glob("*.txt")), ids=lambda path: path.stem)
def test_a_saved_table_says_how_and_when_it_was_made(table: Path) -> None:
    """A table of a GPU, which few machines have, may be older than the rule that says so."""
    text = table.read_text(encoding="utf-8")
    assert table.stem.startswith("gpu") or re.search(r"; commit [0-9a-f]{10}, \d{4}-\d\d-\d\d", " ".join(text.split()))
    command = text.partition("\n\n")[0]
    assert command.startswith("$ python ")
    assert f"--out benchmarks/tables/{table.name}" in command
