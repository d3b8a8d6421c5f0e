"""The page of results is what its text and the experiments' tables make, and says where the code has moved on."""

from __future__ import annotations

import subprocess
import tomllib
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.helpers.errors import raises
from tests.helpers.sources import ROOT
from umbel.protocol.errors import ConfigError
from umbel_lab.experiments import dlg, pac, page, synthetic
from umbel_lab.experiments.__main__ import app

TABLE = """\
# Two linear models

## What was found

One line.

| who | error |
| --- | --- |
| FedAvg | 3.06 |

## Something else

No table.
"""


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    made = tmp_path / "made"
    made.mkdir()
    (made / "table.md").write_text(TABLE)
    page.stamp("synthetic", made, "umbel experiment synthetic", [2000, 2001, 2002, 7], "0123456789")
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "reproduce.md.j2").write_text(
        "# Results\n\n{{ made('synthetic') }}\n{{ text('synthetic', 'What was found') }}\n\n"
        "{{ table('synthetic', 'What was found') }}\n"
    )
    page.take("synthetic", made, folder)
    return folder


def rendered(docs: Path, template: str = "") -> str:
    """Return the page that a template makes; without one, that of before."""
    if template:
        (docs / "reproduce.md.j2").write_text(template)
    return page.render(docs)[docs / "reproduce.md"]


def test_the_page_has_the_experiments_tables_and_what_made_them(docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [path] = page.write(docs)
    assert path == docs / "reproduce.md"
    written = path.read_text()
    for words in ("`umbel experiment synthetic` at commit 0123456789", "seeds 7, 2000 to 2002", "| FedAvg | 3.06 |"):
        assert words in written
    changed = "Settings, recipes or pinned numbers have changed since."
    assert changed not in rendered(docs)
    monkeypatch.setattr(page, "digest", lambda name: "another")
    assert changed in rendered(docs)


@pytest.mark.parametrize(
    ("template", "code", "parts"),
    [
        ("table('synthetic', 'Nothing')", "unknown-table", ["Nothing", "What was found, Something else"]),
        ("table('synthetic', 'What was found', without=('price',))", "unknown-table", ["price", "who, error"]),
        ("cell('synthetic', 'What was found', ('IFCA',), 'error')", "unknown-table", ["What was found"]),
        ("cell('synthetic', 'What was found', ('FedAvg',), 'price')", "unknown-table", ["What was found"]),
        ("sentence('synthetic', 'What was found', 'nowhere')", "unknown-table", ["What was found"]),
        ("made('hospital')", "not-done", ["umbel experiment page hospital"]),
        ("picture('synthetic', 'figure-2', 'Releases')", "not-done", ["figure-2.svg"]),
    ],
)  # fmt: skip
def test_what_was_not_made_is_named(docs: Path, template: str, code: str, parts: list[str]) -> None:
    with raises(ConfigError, f"config.{code}", *parts):
        rendered(docs, f"{{{{ {template} }}}}")


def test_figures_with_a_number_are_taken_over_and_those_of_an_earlier_time_removed(docs: Path, tmp_path: Path) -> None:
    made, kept = tmp_path / "made", docs / "results" / "synthetic"
    (kept / "figure-9.svg").write_text("<svg>old</svg>")
    for name in ("figure-1.svg", "figure-1.png", "curve.svg"):
        (made / name).write_text("<svg/>")
    page.take("synthetic", made, docs)
    assert sorted(file.name for file in kept.iterdir()) == ["figure-1.svg", "made.toml", "table.md"]
    picture = rendered(docs, "{{ picture('synthetic', 'figure-1', 'Releases') }}")
    assert picture == "![Releases](../results/synthetic/figure-1.svg)"
    with raises(ConfigError, "config.not-done", "table.md", "umbel experiment hospital"):
        page.take("hospital", tmp_path / "nowhere", docs)
    with raises(ConfigError, "config.unknown-experiment", "cifar"):
        page.take("cifar", tmp_path, docs)


def test_the_digest_is_of_settings_and_of_what_pins_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, patterns in ((name, experiment.sources) for name, experiment in page.EXPERIMENTS.items()):
        assert all(list(ROOT.glob(pattern)) for pattern in patterns), name
    assert page.digest("synthetic") != page.digest("hospital")
    files = [
        tmp_path / file.relative_to(ROOT)
        for pattern in (page._PINNED, *page.EXPERIMENTS["synthetic"].sources)
        for file in sorted(ROOT.glob(pattern))
    ]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes((ROOT / file.relative_to(tmp_path)).read_bytes())
    pinned, module, arms, config, recipe = files
    monkeypatch.setattr(page, "source", lambda name: tmp_path / name)
    before = page.digest("synthetic")
    for file, old, new, counts in (
        (module, "NEAR = 1.0", "NEAR = 2.0", True),
        (recipe, "DECIMALS = 6", "DECIMALS = 5", True),
        (config, "rounds = 100", "rounds = 101", True),
        (arms, "restarts = 5", "restarts = 6", True),
        (arms, "The paper shows", "The paper tells of", False),
        (module, "def page(", "# A comment.\ndef page_of(", False),
        (recipe, "OPTIMA = ", "TEXT = 'An error.'\nOPTIMA = ", False),
        (config, "rounds = 100", "# A comment.\nrounds = 100", False),
    ):
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new, 1))
        assert (page.digest("synthetic") != before) is counts, (file.name, new)
        file.write_text(text)
    pinned.write_bytes(b"other numbers")
    assert page.digest("synthetic") != before


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout with a module, a test and a setting."""
    for file in ("umbel/core.py", "configs/a.toml", "tests/test_core.py"):
        path = tmp_path / "tree" / file
        path.parent.mkdir(parents=True)
        path.write_text("rounds = 3\n")
    (tmp_path / "tree" / ".gitignore").write_text("__pycache__\n")
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "First"]):
        git(tmp_path / "tree", "-c", "user.name=A", "-c", "user.email=a@example.org", *words)
    return tmp_path / "tree"


def git(tree: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=tree, check=True, capture_output=True, text=True).stdout.strip()


def test_a_result_names_the_commit_of_a_tree_without_changes(tree: Path, tmp_path: Path) -> None:
    commit = git(tree, "rev-parse", "--short=10", "HEAD")
    assert page.commit_of(tree) == page.commit_of(tree, quick=True) == commit
    (tree / "tests" / "test_core.py").write_text("")  # makes no result
    (tree / "umbel" / "__pycache__").mkdir()
    (tree / "umbel" / "__pycache__" / "core.pyc").write_bytes(b"")
    assert page.commit_of(tree) == commit
    assert page.commit_of(tmp_path) == "unknown", "where umbel is installed"


@pytest.mark.parametrize(
    ("file", "added"), [("umbel/core.py", False), ("umbel/new.py", False), ("configs/a.toml", True)]
)
def test_no_result_is_of_a_modified_tree(tree: Path, file: str, added: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree / file).write_text("rounds = 4\n")
    if added:
        git(tree, "add", ".")
    with raises(ConfigError, "config.modified-tree", file, "--quick"):
        page.commit_of(tree)
    assert page.commit_of(tree, quick=True) == git(tree, "rev-parse", "--short=10", "HEAD") + "+"
    # No experiment starts its work there.
    monkeypatch.setattr(page, "commit_of", partial(page.commit_of, tree))
    for command, module in (("synthetic", synthetic), ("pac", pac), ("dlg", dlg)):
        for work in {"arms", "page"} & vars(module).keys():
            monkeypatch.setattr(module, work, lambda *_, **__: pytest.fail("work has begun"))
        done = CliRunner().invoke(app, [command])
        assert (done.exit_code, "[config.modified-tree]" in done.stderr) == (2, True)


def test_the_pages_in_docs_are_what_their_text_and_the_kept_tables_make() -> None:
    pages = page.render()
    assert pages.keys() == {template.with_suffix("") for template in page.DOCS.rglob("*.j2")}
    for path, text in pages.items():
        assert text == path.read_text(encoding="utf-8"), "umbel experiment page"


def test_all_that_is_on_the_page_says_its_command_a_commit_of_this_history_and_seeds() -> None:
    text = "".join(template.read_text(encoding="utf-8") for template in page.DOCS.rglob("*.j2"))
    commits = {}
    for folder in (page.DOCS / "results").iterdir():
        said = tomllib.loads((folder / "made.toml").read_text(encoding="utf-8"))
        assert said["command"].startswith(("umbel experiment ", "python "))
        assert said["seeds"]
        if folder.name not in page.FROZEN:
            assert said["settings"] == page.digest(folder.name), "its settings have changed since: run it again"
        assert f"made('{folder.name}')" in text
        assert all(file.stat().st_size < 150_000 for file in folder.glob("*.svg")), "figures in docs are small"
        commits[folder.name] = said["commit"].rstrip("+")
    assert all(commit.isalnum() for commit in commits.values())
    if not (ROOT / ".git").exists() or git(ROOT, "rev-parse", "--is-shallow-repository") == "true":
        pytest.skip("the history is not here")
    ancestor = ["git", "merge-base", "--is-ancestor"]
    unknown = [
        name
        for name, commit in commits.items()
        if subprocess.run([*ancestor, commit, "HEAD"], cwd=ROOT, capture_output=True).returncode
    ]
    assert unknown == [], "these cite commits that are not there: run them again"
