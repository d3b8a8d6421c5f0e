"""Where umbel uses what is not public in Flower is listed, bounded, and asked of Flower."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from tools import private

LISTED: dict[str, Any] = tomllib.loads(private.LIST.read_text(encoding="utf-8"))


def test_the_list_is_true_and_the_page_is_written_from_it() -> None:
    assert not private.faults(LISTED)
    page = private.PAGE.read_text(encoding="utf-8")
    assert private.written(page, LISTED) == page
    for kind in LISTED["most"]:
        for name, (why, offer) in LISTED[kind].items():
            assert f"| `{name}` | {why} | {offer} |" in page
    assert LISTED["most"] == {"modules": 20, "assigned": 15}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from flwr.app import Message\nfrom flwr.common import log", set()),
        ("from flwr.serverapp.strategy import FedAvg", set()),
        ("from flwr.supercore.run import Run", {"flwr.supercore.run"}),
        ("import flwr.proto.run_pb2 as run", {"flwr.proto.run_pb2"}),
        ("import_module('flwr.cli.build').build()", {"flwr.cli.build"}),
        ("sys.modules.get('flwr.cli.build')", {"flwr.cli.build"}),
        ("patch('flwr.cli.build:name')", {"flwr.cli.build"}),
        ("from flwr.app import Array\nArray.inflate = None", {"flwr.app:Array.inflate"}),
        ("from flwr.app import Array\nsetattr(Array, 'inflate', None)", {"flwr.app:Array.inflate"}),
        ("from flwr.app import Array as A\ndef f():\n    a = A(1)\n    a._b, a.c = 1, 2", {"flwr.app:Array()._b"}),
        ("def f():\n    m = import_module('flwr.x')\n    m.K.f = 1", {"flwr.x", "flwr.x:K.f"}),
        ("def f():\n    m: Any = import_module('flwr.x')\n    m.f += 1", {"flwr.x", "flwr.x:f"}),
        (
            "def f():\n    m = import_module('flwr.x')\n    _replace(m, m.f, saves_time=True, g=1)",
            {"flwr.x", "flwr.x:g"},
        ),
        ("logger = getLogger('flwr')\nlogger.level = 1", set()),
        ("message.__dict__['_content'] = 1", {"_content"}),
        ("record.__dict__.get('_data')", {"_data"}),
        ("self.__dict__['value'] = 1", set()),
        ("def f():\n    m = import_module('flwr.x')\ndef g(m):\n    m.f = 1", {"flwr.x"}),
    ],
)
def test_private_names_are_found_however_they_are_used(source: str, found: set[str]) -> None:
    assert {name for _, name in private.found_in(source)} == found


def test_what_is_not_listed_or_elsewhere_or_too_much_is_named(tmp_path: Path) -> None:
    for name, text in {
        "umbel/door.py": "from flwr.cli.build import build\nfrom flwr.app import Array\nArray.x = 1\n",
        "lab/other.py": "import flwr.supercore.run\n",
    }.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text, encoding="utf-8")
    listed = {"files": ["umbel/door.py"], "most": {"modules": 0, "assigned": 1}, "assigned": {"y": []}}
    faults = private.faults(listed | {"modules": {"flwr.cli.build": ["", ""]}}, tmp_path)
    assert faults == [
        "lab/other.py uses flwr.supercore.run; only umbel/door.py may",
        "1 modules, of at most 0",
        "flwr.app:Array.x is assigned, and not in private.toml",
        "y is in private.toml, and not assigned",
    ]
