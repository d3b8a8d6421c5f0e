"""The docs say what the code does, where that can be checked."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import math
import re
import shlex
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

import umbel
from tests.helpers import commands
from tests.helpers.sources import ROOT, files
from tools.words import MOST, count
from umbel.client.app import app as client_app
from umbel.privacy.accounting.guarantee import guarantee, secure_release, site_release
from umbel.privacy.accounting.rows import row_guarantee
from umbel.protocol.release import Clipping, Kind, Release, RowPrivacy

DOCS = ROOT / "docs"
BESIDE = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md")]
PRE_COMMIT = ROOT / ".pre-commit-config.yaml"
PAGES = [*BESIDE, *sorted(page for page in DOCS.rglob("*.md") if "_build" not in page.parts)]
FOLDERS = "benchmarks|configs|datasets|docs|examples|lab|tests|umbel"

of_each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@of_each_page
def test_every_command_would_be_understood(page: Path) -> None:
    wrong = []
    for words in commands.commands(page.read_text(encoding="utf-8")):
        try:
            commands.check(words)
        except AssertionError as error:
            wrong.append(f"{' '.join(words)}: {error}")
    assert not wrong, "\n".join(wrong)


@of_each_page
def test_every_row_of_a_table_has_as_many_cells_as_its_head(page: Path) -> None:
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, *rows = [len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()]
        assert {*rows} == {head}, table


def test_every_command_in_a_docstring_would_be_understood() -> None:
    found = [words for file in files(("umbel", "lab", "benchmarks", "examples")) for words in commands.documented(file)]
    assert len(found) > 20
    for words in found:
        commands.check(words)


@pytest.mark.parametrize(
    "line",
    [
        "python -m umbel.privacy plan", "python datasets/none.py", "umbel runn", "umbel run --in-proces",
        "umbel run hospitals", "umbel run rouns=3", "umbel site journal|remove PATH",
        "RAY_ADDRESS=HOST:PORT umbel wander", "make tests", "make certs NODE=x", "flwr walk .",
        "docker compose run clientapp umbel ledgers", "pip install -e .[all]", "curl x", "cp .env.none .env",
        "python -m umbel.deploy.node --superlinks a:1",
    ],
)  # fmt: skip
def test_a_command_that_is_gone_is_found(line: str) -> None:
    *right, wrong = commands.commands(f"```bash\n{line}\n```")
    for words in right:
        commands.check(words)
    with pytest.raises(AssertionError):
        commands.check(wrong)


def test_commands_are_found_wherever_they_stand() -> None:
    text = """`umbel run` and `umbel refused` in a log, `umbel.run`
  ```bash
  A=1 umbel run \\
      hospital 'x=1 y' > out && make test  # all | of them
  umbel site log|journal [--all] …
  ```"""
    found = ["umbel run hospital 'x=1 y' > out", "make test", "umbel site log --all", "umbel site journal --all"]
    assert [*commands.commands(text)] == [shlex.split(line) for line in [*found, "umbel run"]]


def named(code: ast.AST, umbel: bool) -> set[str]:
    """Return what code imports of umbel, and with ``import umbel`` what it names of it, each with its dots."""
    names: set[str] = set()
    for node in ast.walk(code):
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute) and umbel and re.fullmatch(r"umbel(\.\w+)+", name := ast.unparse(node)):
            names.add(name)
    return {name for name in names if name.partition(".")[0] in ("umbel", "umbel_lab")}


def resolved(name: str) -> Any:
    """Return what a name with dots is; fail where there is none."""
    module, *left = name.split(".")
    found = importlib.import_module(module)
    for part in left:
        module += f".{part}"
        if not hasattr(found, part):
            importlib.import_module(module)
        found = getattr(found, part)
    return found


@of_each_page
def test_every_example_in_python_names_what_is_there(page: Path) -> None:
    for block in commands.blocks(page.read_text(encoding="utf-8"), "python"):
        code = ast.parse(block)
        for name in named(code, umbel=True):
            resolved(name)
        for call in ast.walk(code):
            if isinstance(call, ast.Call) and re.fullmatch(r"umbel(\.\w+)+", ast.unparse(call.func)):
                keywords = dict.fromkeys(keyword.arg for keyword in call.keywords if keyword.arg)
                inspect.signature(resolved(ast.unparse(call.func))).bind_partial(*call.args, **keywords)


@of_each_page
def test_every_example_in_toml_is_toml(page: Path) -> None:
    for block in commands.blocks(page.read_text(encoding="utf-8"), "toml"):
        tomllib.loads(block)


@of_each_page
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert page not in BESIDE or not re.search(r"\w@\w+\.\w", text), "an address"
    for link in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", text):
        assert (page.parent / link).exists(), link
    for code in commands.inline(text):
        if match := re.fullmatch(rf"((?:{FOLDERS})/[\w./*-]+)(?:::(\w+))?", code):
            path, test = match.groups()
            assert path.startswith("docs/_build") or [*ROOT.glob(path)], path
            assert not test or f"def {test}(" in (ROOT / path).read_text(encoding="utf-8"), code
        elif re.fullmatch(r"umbel(_lab)?(\.\w+)+", code):
            resolved(code)


def table(head: str) -> list[list[str]]:
    """Return the rows of the table of the threat model that begins with a given line."""
    text = (DOCS / "explain" / "threat-model.md").read_text(encoding="utf-8")
    rows = text.partition(f"{head}\n")[2].partition("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def test_each_message_that_a_site_answers_stands_in_the_docs_with_what_leaves() -> None:
    told = {row[0].partition(",")[0] for row in table("| message | reply |")}
    assert told == {name.removesuffix(".default") for name in client_app._registered_funcs}


def test_each_mode_stands_in_the_docs_with_what_the_account_makes_of_it() -> None:
    """At n = 11, nu = 20 and choice-epsilon .5 among 5 hypotheses."""
    head = "| mode | setting | pure ε of a release, with Laplace noise | promised to |"
    rows = {row[0].strip("| "): row[2:] for row in table(head)}
    release = Release(Kind.TRAIN, 11, 20.0, Clipping.PUBLIC, hypotheses=5, choice_epsilon=0.5)
    modes = {
        "clients' release": release,
        "open choice": dataclasses.replace(release, choice_epsilon=0.0),
        "the paper's clipping": dataclasses.replace(release, clipping=Clipping.UPDATE),
        "site release": site_release(release),
        "reports with noise": Release(Kind.REPORT, 2, 20.0, Clipping.PUBLIC),
        "a site's mean loss": Release(Kind.REPORT, 2, 20.0, Clipping.PUBLIC),
        "unsanitised": dataclasses.replace(release, noise_multiplier=0.0),
    }
    without = {"exact losses", "secure sum", "each row"}
    assert rows.keys() - modes.keys() == without, "of which there is no account without a delta"
    said = {"2n/ν + `choice-epsilon`": 1.6, "2/ν": 0.1, "none": None}
    for mode, release in modes.items():
        cost, to = rows[mode]
        found = guarantee({release: 1}, 0.0)
        assert (found and found.pure) == said[cost], mode
        assert to.startswith("no client" if found is None else "each client"), mode
    assert rows["exact losses"][0] == "none"
    own = dataclasses.replace(modes["clients' release"], mechanism="discrete-gaussian")
    together = guarantee({secure_release(own): 1})
    assert together is not None
    assert together.epsilon < together.pure == math.inf
    assert rows["secure sum"][0] == "none: an ε at δ only"
    of_rows = modes["unsanitised"].trained_by(RowPrivacy(1.0, 1.0, 0.1, 10.0, 10))
    hidden = row_guarantee({of_rows: 1})
    assert guarantee({of_rows: 1}) is None
    assert hidden is not None
    assert hidden.epsilon < hidden.pure == math.inf
    assert rows["each row"][0] == "none: an ε at δ only"


def test_the_docs_are_no_longer_than_they_may_be() -> None:
    counted = count()
    assert counted.total() <= 27_000
    assert not [section for section, most in MOST.items() if counted[section] > most]


def test_git_runs_the_checks_of_make_before_a_commit() -> None:
    hooks = [hook for repo in yaml.safe_load(PRE_COMMIT.read_text(encoding="utf-8"))["repos"] for hook in repo["hooks"]]
    for hook in hooks:
        commands.check(hook["entry"].split())
    assert "make check" in [hook["entry"] for hook in hooks]


def test_the_readme_compares_with_the_versions_that_benchmarks_and_audits_install() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    pinned = [file.read_text(encoding="utf-8") for file in (ROOT / "benchmarks/peers/requirements").glob("*.txt")]
    installed = "\n".join([*pinned, (DOCS / "results/audits/table.md").read_text(encoding="utf-8")])
    packages = {"Flower": r"flwr(?:\[\w+\])?", "NVFlare": "nvflare", "FL4Health": "fl4health", "pfl-research": "pfl"}
    for name, package in packages.items():
        assert f"| {name} {{}}.{{}} |".format(*re.findall(rf"\b{package}==(\d+)\.(\d+)", installed)[0]) in readme


def test_the_figures_in_the_readme_are_those_of_the_saved_runs() -> None:
    """The picture is drawn from them; its text in README and on the first page has them in words."""
    picture = (DOCS / "pictures" / "hospital.svg").read_text(encoding="utf-8")
    figures = re.findall(r"[a-z4] ([\d,]+)(?=[;,.])", picture.partition("<desc")[2].partition("</desc")[0])
    assert len(figures) == 6
    for page in (ROOT / "README.md", DOCS / "index.md"):
        text = " ".join(page.read_text(encoding="utf-8").split())
        assert (
            "alone: {}. Together without privacy: {}. Together at a pure epsilon of 4: {}.".format(*figures[::2])
            in text
        )
        assert "The worst tenth: {}, {} and {}.".format(*figures[1::2]) in text
        text = re.sub(r"!\[.*?\]", "", text)
        assert {*re.findall(r"([\d,]+) dollars", text)} <= {*figures[::2]}


def test_the_page_of_the_api_has_every_public_name() -> None:
    page = (DOCS / "reference" / "api.md").read_text(encoding="utf-8")
    listed = {name for names in re.findall(r"^<!-- api (.*) -->$", page, re.MULTILINE) for name in names.split()}
    assert {*umbel.__all__} <= listed
    for name in listed - {*umbel.__all__}:
        resolved(f"umbel.{name}")


def test_the_readmes_apps_work_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    server, client = commands.blocks((ROOT / "README.md").read_text(encoding="utf-8"), "python")
    own = ModuleType("my_app.model")
    own.__dict__.update(Net=lambda: torch.nn.Linear(2, 1), loss=lambda arrays, context: 0.0)
    monkeypatch.setitem(sys.modules, "my_app", ModuleType("my_app"))
    monkeypatch.setitem(sys.modules, "my_app.model", own)
    for code, kind in ((server, ServerApp), (client, ClientApp)):
        names: dict[str, Any] = {}
        exec(code, names)
        assert isinstance(names["app"], kind)
