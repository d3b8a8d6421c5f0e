"""A policy in a file: a node's configuration and its environment make the site stricter, never more open."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.errors import raises
from tests.helpers.keys import pair
from tests.privacy.site.test_config import SET, WITH
from umbel.privacy.site.config import Site
from umbel.privacy.site.policy import Budget, Mark, Narrows, Policy
from umbel.privacy.site.policy_file import END, read_policy
from umbel.protocol.errors import SiteError
from umbel.protocol.options import AS_TEXT

Write = Callable[[str], dict[str, Any]]


@pytest.fixture(autouse=True)
def sites_accept_the_paper() -> None:
    """Leave the policy's own defaults, which the environment of other tests widens."""


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a policy file; return the node configuration that names it."""

    def written(text: str) -> dict[str, Any]:
        path = tmp_path / "policy.toml"
        path.write_text((text or "role = 'train'") + f"\n{END}\n")  # without an entry it is refused
        path.chmod(0o644)
        return {"policy-file": str(path)}

    return written


def test_a_site_may_say_everything_in_its_file(write: Write, tmp_path: Path) -> None:
    _, ann = pair(tmp_path / "ann")
    node = write(f'''
        data-path = "/data/site"
        budget = 4
        paper-budget = inf
        min_noise_multiplier = 2.5
        mechanisms = ["laplace", "gaussian"]
        reports = "exact=true"
        [researchers]
        ann = "{ann} ann@example.org"
    ''')
    site = Site.of(node)
    policy = site.policy
    assert site.data_path == Path("/data/site")
    assert (policy.budget.epsilon, policy.paper_budget, policy.min_noise_multiplier) == (4, math.inf, 2.5)
    assert (policy.mechanisms, policy.reports.exact) == ("laplace gaussian", True)
    assert policy.keys == {"ann": ann.split()[1]}


@pytest.mark.parametrize(
    ("file", "narrower", "wider"),
    [
        ("budget = 4.0", {"budget": 3.0}, {"budget": 4.5}),
        ("", {"budget": 8.0}, {"budget": 8.5}),  # the default is as much the file's as what it says
        ("", {"budget": 1.0}, {"budget": "inf"}),
        ("min-noise-multiplier = 5", {"min-noise-multiplier": 6}, {"min-noise-multiplier": 4}),
        ("row-budget = 4.0", {"row-budget": 3.0}, {"row-budget": 5.0}),
        ('budget = "4 delta=1e-6"', {"budget": "4 delta=1e-7"}, {"budget": "3 delta=1e-5"}),
        ('budget = "4 delta=1e-6"', {"budget": 3.0}, {"budget": "5 delta=1e-7"}),
        ('row-budget = "4 delta=1e-6"', {"row-budget": "3 delta=1e-6"}, {"row-budget": "4 delta=1e-5"}),
        ('reader = "mine:read a=b"', {"reader": "mine:read a=b"}, {"reader": "mine:read a=c"}),
        ("", {"row-budget": 4.0, "protect": "both"}, {"rows": "noise=0.1"}),
        ('protect = "both"', {"protect": "both"}, {"protect": "clients"}),
        ('clipping = "any"', {"clipping": "public"}, {}),
        ("", {"clipping": "public"}, {"clipping": "any"}),
        ('release = "any"', {"release": "site"}, {}),
        ('release = "site"', {"release": "site"}, {"release": "client"}),
        ('release = "client"', {}, {"release": "any"}),
        ('approve = "ask"', {"approve": "ask"}, {"approve": "policy"}),
        ("", {"approve": "ask"}, {}),
        ('mechanisms = "laplace gaussian"', {"mechanisms": "gaussian"}, {"mechanisms": "gaussian mine:Noise"}),
        ('strategies = ["fedavg", "ifca"]', {"strategies": "ifca"}, {"strategies": ""}),
        ("", {"strategies": "ifca"}, {}),
        ('reports = "exact=true bound=2"', {"reports": "bound=1"}, {"reports": "exact=true bound=3"}),
        ("", {"reports": "bound=0.5"}, {"reports": "noise=5"}),
        ('max-work = "epochs=5"', {"max-work": "epochs=4 steps=9"}, {"max-work": "epochs=4 steps=1001"}),
        ("", {"clipping": "public floor=0.1"}, {"clipping": "public floor=0.001"}),
        ("", {}, {"reports": "exact=true"}),
        ("", {"keep-model": "/models"}, {"app": "mine.client_app:app"}),
        ('keep-model = "/models"', {"keep-model": "/models"}, {"keep-model": "/elsewhere"}),
        ('ranges = "all"', {"ranges": "age"}, {}),
        ('ranges = "age,income"', {"ranges": "age"}, {"ranges": "age,cost"}),
        ('ranges = "age clients=20 epsilon=1"', {"ranges": "age clients=30 epsilon=0.5"}, {"ranges": "age epsilon=1"}),
        ('ranges = "age epsilon=1"', {"ranges": "no"}, {"ranges": "age epsilon=2"}),
        ('ranges = "no"', {}, {"ranges": "age"}),
        ("", {}, {"bundle": "ab" * 32}),
        ("", {}, {"role": "validation"}),
        ("", {}, {"insecure-seed": True, "budget": "inf"}),
        ("", {}, {"researchers": "ann=AAAAC3NzaC1lZDI1NTE5AAAAII5esJklLdUt2GoWtWkgDFbiKIwOkFmx72zoQsuZiyZb"}),
    ],
)
@pytest.mark.parametrize("environment", [False, True])
def test_other_entries_may_only_narrow_it(
    file: str,
    narrower: dict[str, Any],
    wider: dict[str, Any],
    environment: bool,
    write: Write,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = {"data-path": "/data/site"} | write(file)
    for own, refused in ((narrower, False), (wider, True)):
        if not own:
            continue
        for key, value in own.items() if environment else ():
            monkeypatch.setenv(f"UMBEL_{key.replace('-', '_').upper()}", str(value))
        if refused:
            with raises(SiteError, "site.widens-policy", base["policy-file"]):
                Site.of(base if environment else base | own)
        else:
            policy = Site.of(base if environment else base | own).policy
            assert policy == Policy.parse(read_policy(Path(base["policy-file"])) | base | own)
        for key in own if environment else ():
            monkeypatch.delenv(f"UMBEL_{key.replace('-', '_').upper()}")


def test_each_entry_is_free_narrows_or_is_the_files_alone(write: Write) -> None:
    """An entry that is new in the policy is the file's alone until somebody decides otherwise."""
    marks = {name: field.metadata for name, field in zip(Policy.names(), Policy.model_fields.values(), strict=True)}
    free = {name for name in SET if Mark.FREE in marks[name]}
    narrows = {
        name for name, found in marks.items() if any(isinstance(mark, Narrows) for mark in found) or AS_TEXT in found
    }
    alone = {*SET} - free - narrows
    assert alone == {
        "app", "bundle", "insecure-seed", "parties", "researchers", "role",
    }  # fmt: skip
    base = {"data-path": "/data/site"} | write("")
    for key in alone:
        entries = {name: text for name, text in WITH.get(key, {}).items() if name in free}
        with raises(SiteError, "site.widens-policy", base["policy-file"]):
            Site.of(base | entries | WITH.get(key, {}) | {key: SET[key][0]})


def test_a_file_that_others_can_write_is_refused(write: Write) -> None:
    node = write("data-path = '/data'")
    for mode in (0o664, 0o646):
        Path(node["policy-file"]).chmod(mode)
        with raises(SiteError, "site.policy-file", node["policy-file"], f"{mode:o}"):
            Site.of(node)


@pytest.mark.parametrize(
    ("text", "code", "part"),
    [
        ("budget = ", "policy-file", "policy.toml"),
        ("budgets = 3", "unknown-key", "budget"),
        ("data-path = '/data'\nbudget = -1", "wrong-value", "budget"),
        ("policy-file = '/other'", "policy-file", "policy-file"),
        ("[researchers]\nann = 'no key'", "bad-key", "ann"),
        ("[researchers]\n'ann smith' = 'AAAA'", "bad-key", "ann smith"),
        ("data-path = '/data'\n[researchers]\nann = 'AAAA'", "bad-key", "ann"),
        ("[researchers]\nann = 'AAAA3NzaC1'\ndata-path = '/data'", "bad-key", "above all tables"),
        ("budget = 3", "no-data", "data-path"),
        # What would open the site: an empty file, as while it is written, and a list of no one.
        ("\n", "policy-file", "empty"),
        ("# budget = 3", "policy-file", "empty"),
        ("data-path = '/data'\n[researchers]", "conflict", "no one"),
        ("data-path = '/data'\nresearchers = ' '", "conflict", "no one"),
        ("strategies = []", "policy-file", "strategies"),
        # A number that no machine holds is no infinite limit.
        ("data-path = '/data'\nbudget = 1e400", "wrong-value", "budget"),
        ("data-path = '/data'\nmax-participations = 1e309", "wrong-value", "max-participations"),
        ("data-path = '/data'\nbudget = -inf", "wrong-value", "budget"),
        ("data-path = '/data'\npolicy_file = '/other'", "policy-file", "policy-file"),
        (f"reader = {'[' * 9999}", "policy-file", "policy.toml"),
    ],
)
def test_a_fault_in_the_file_closes_the_site(text: str, code: str, part: str, write: Write) -> None:
    with raises(SiteError, f"site.{code}", part):
        Site.of(write(text))


def test_a_key_is_one_researchers(write: Write, tmp_path: Path) -> None:
    """Otherwise the log would name one for the other's run."""
    (_, ann), (_, bob) = pair(tmp_path / "ann"), pair(tmp_path / "bob", "ecdsa")
    assert len(Site.of(write(f"data-path = '/data'\n[researchers]\nann = '{ann}'\nbob = '{bob}'")).policy.keys) == 2
    with raises(SiteError, "site.conflict", "ann", "eve"):
        Site.of(write(f"data-path = '/data'\n[researchers]\nann = '{ann}'\nbob = '{bob}'\neve = '{ann} eve@x'"))


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_file_that_was_cut_anywhere_closes_the_site(newline: str, tmp_path: Path) -> None:
    """As by a full disk or a broken copy; between two lines it would still be TOML, with fewer limits."""
    _, ann = pair(tmp_path / "ann")
    lines = ['data-path = "/data"', "", "budget = 4", "# a comment", "[researchers]", f'ann = "{ann.strip()}"', END]
    whole = newline.join(lines).encode()
    path = tmp_path / "policy.toml"
    indented = newline.join(f"    {line}" for line in lines).encode()
    for text in (whole, whole + newline.encode(), whole + b"\n \n", indented):
        path.write_bytes(text)
        path.chmod(0o644)
        assert Site.of({"policy-file": str(path)}).policy.budget == Budget(4.0)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(SiteError) as error:
            Site.of({"policy-file": str(path)})
        assert error.value.code in ("site.policy-file", "site.policy-cut")
    path.write_bytes(newline.join(lines[:5]).encode())
    with raises(SiteError, "site.policy-cut", path):
        Site.of({"policy-file": str(path)})
    path.write_bytes(whole + newline.encode() + b'bob = "AAAA"')
    with raises(SiteError, "site.policy-cut", path):
        Site.of({"policy-file": str(path)})


def test_a_file_that_is_missing_closes_the_site(tmp_path: Path) -> None:
    with raises(SiteError, "site.policy-file", tmp_path / "gone.toml"):
        Site.of({"data-path": "/data", "policy-file": str(tmp_path / "gone.toml")})
    for name in ("policy.toml", "~/policy.toml"):
        with raises(SiteError, "site.relative-path", "policy.toml"):
            Site.of({"data-path": "/data", "policy-file": name})


def test_the_digest_is_that_of_the_effective_policy(write: Write) -> None:
    base = {"data-path": "/data/site"}
    plain = Site.of(base).policy.digest
    assert Site.of(base | write("")).policy.digest == plain, "however it is written"
    assert Site.of(base | write("budget = 4")).policy.digest != plain
    assert Site.of(base | write("budget = 4")).policy.digest == Site.of(base | {"budget": 4.0}).policy.digest
