"""The parts of the site that come from the program: every command, every setting and who decides it."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
from types import ModuleType
from typing import Any

import pytest

from tests.helpers import commands
from tests.helpers.errors import raises
from tests.helpers.messages import task_of
from tests.helpers.sources import ROOT
from umbel.cli.main import COMMANDS, LAB
from umbel.privacy.site.policy import Policy
from umbel.protocol.errors import Refused
from umbel.protocol.release import Clipping
from umbel.protocol.run_config import RunConfig


@pytest.fixture(scope="module")
def generated() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generated", ROOT / "docs" / "generated.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_command_has_a_heading_and_its_options(generated: ModuleType) -> None:
    page = generated.commands()
    headings = re.findall(r"^#+ umbel (.*)$", page, re.MULTILINE)
    assert {*COMMANDS, *LAB} == {heading.split()[0] for heading in headings}
    assert {"data import", "site start", "experiment hospital", "runs show"} <= {*headings}
    for heading in headings:
        commands.check(["umbel", *heading.split(), "--help"])
    run = page.partition("### umbel run\n")[2].partition("\n### ")[0]
    assert "| `--strict`" in run
    assert not re.search(r"\[/?(bold|italic|dim|cyan)\]", page), "a terminal's markup"


def test_a_cell_of_a_table_keeps_to_its_cell(generated: ModuleType) -> None:
    assert generated._cell("a|b\n*c* <d>") == r"a\|b \*c\* \<d\>"
    for line in [*generated.run_config().splitlines(), *generated.policy().splitlines()]:
        if line.startswith("|"):
            assert len(re.findall(r"(?<!\\)\|", line)) in (5, 6), line


def test_every_setting_stands_with_its_default_and_its_range(generated: ModuleType) -> None:
    for kind, page in ((RunConfig, generated.run_config()), (Policy, generated.policy())):
        assert re.findall(r"^\| `([a-z-]+)` \|", page, re.MULTILINE) == [name for name, *_ in kind.table()]
    assert "| `quorum` | `1.0` | a finite number above 0, at most 1 |" in generated.run_config()


WEAK: dict[str, tuple[Any, Any, str]] = {
    "local-epochs": (2, "epochs=1", "work"),
    "local-steps": (2, "steps=1", "work"),
    "noise-multiplier": (1.0, 2.0, "noise"),
    "mechanism": ("gaussian", "laplace", "mechanism"),
    "choice-epsilon": (2.0, 1.0, "choice"),
    "clipping": (Clipping.UPDATE, "public", "clipping"),
}
"""By a key: a task's value, a site's bound that refuses it, and the refusal."""


def test_a_site_bounds_what_the_table_says_that_it_bounds(generated: ModuleType) -> None:
    limits = dict(generated.LIMITS)
    assert limits.keys() <= {*RunConfig.names()}
    assert {*limits.values()} <= {*Policy.names()}
    for key, (asked, bound, why) in WEAK.items():
        field, entry = key.replace("-", "_"), limits.pop(key).replace("-", "_")
        task = task_of(clipping=Clipping.PUBLIC, choice_epsilon=1.0)
        task = dataclasses.replace(task, **{field: asked})
        with raises(Refused, f"refused.{why}"):
            Policy(**{entry: bound}).check(task, 2)
    # The first is checked where hypotheses arrive; the floor does not refuse, but holds (tests/privacy/site).
    assert [*limits] == ["hypotheses", "rows"]


def test_every_error_stands_with_its_cause_and_most_with_a_remedy(generated: ModuleType) -> None:
    rows = [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in generated.errors().splitlines()[2:]]
    known = json.loads((ROOT / "tests" / "public_api.json").read_text(encoding="utf-8"))["errors"]
    assert {f"`{code}`" for code in known} <= {row[0] for row in rows}
    assert all(len(row[2]) > 5 for row in rows)
    assert sum(len(row) == 4 for row in rows) > len(rows) / 2
