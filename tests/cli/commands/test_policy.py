"""`umbel site policy` says in words what a policy allows, promises and leaves out."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from umbel.cli.main import app
from umbel.console.page import explained
from umbel.privacy.mechanisms import MECHANISMS
from umbel.privacy.site.policy import Policy

KEY = "AAAAC3NzaC1lZDI1NTE5AAAAII5esJklLdUt2GoWtWkgDFbiKIwOkFmx72zoQsuZiyZb"


def answer(question: str, **entries: object) -> str:
    return dict(explained(Policy.parse({key.replace("_", "-"): value for key, value in entries.items()})))[question]


def test_a_file_is_checked_and_explained(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text(f'budget = 4\n[researchers]\nann = "ssh-ed25519 {KEY} x"\n# end\n')
    done = CliRunner().invoke(app, ["site", "policy", str(file)])
    assert done.exit_code == 0, done.output
    for told in (
        Policy.parse({"budget": 4, "researchers": f"ann={KEY}"}).digest,
        "epsilon of 4,",
        "signed are answered: ann",
    ):
        assert told in " ".join(done.output.split())
    file.write_text("budget = -4\n# end\n")
    done = CliRunner().invoke(app, ["site", "policy", str(file)])
    assert (done.exit_code, "[site.wrong-value]" in done.output) == (2, True)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("allow-unsanitised = true", "allow-unsanitised"),
        ("min-noise-multiplier = 0", "not-positive"),
        ("insecure-seed = true", "insecure-seed"),
        ("place = '9/2'", "place"),
        ("keep-model = 'models'", "relative-path"),
    ],
)
def test_a_policy_that_closes_a_site_is_not_explained(text: str, code: str, tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(f"{text}\n# end\n")
    done = CliRunner().invoke(app, ["site", "policy", str(tmp_path / "policy.toml")])
    assert (done.exit_code, f"[site.{code}]" in done.output) == (2, True)


@pytest.mark.parametrize(
    ("entries", "gap"),
    [
        ({"budget": "inf"}, "no budget"),
        ({"clipping": "any"}, "clipping depends on the data"),
        ({"max_choice_epsilon": "inf"}, "which group"),
        ({"role": "split", "reports": "exact=true"}, "exact losses"),
        ({"insecure_seed": True}, "seed"),
        ({"mechanisms": "laplace mine:Noise"}, "mine:Noise"),
        ({"app": "mine.client_app:app"}, "mine.client_app:app"),
    ],
)
def test_what_a_policy_does_not_cover_is_said(entries: dict[str, object], gap: str) -> None:
    assert gap in answer("what is not covered", **entries)
    assert answer("what is not covered") == "Nothing that this policy allows."
    assert answer("what is not covered", mechanisms="discrete-gaussian") == "Nothing that this policy allows."


def test_umbels_own_mechanisms_are_no_other_code() -> None:
    told = answer("what is not covered", mechanisms=" ".join(MECHANISMS), budget="8 delta=1e-5")
    assert told == "Nothing that this policy allows."


def test_what_leaves_and_who_may_ask_follow_the_entries() -> None:
    assert "single clients" in answer("what leaves")
    assert "at least 25 clients" in answer("what leaves", release="site", min_clients=25)
    assert "mean loss" in answer("what leaves", role="validation")
    assert "single clients" not in answer("what leaves", role="validation")
    assert "server alone" in answer("who may ask")
    assert "people approve" in answer("who may ask", approve="ask")
    assert "Every other run waits" in answer("who may ask", researchers=f"ann={KEY}")


def test_questions_about_ranges_are_told_if_the_site_answers_any() -> None:
    assert "ranges" not in answer("what leaves")
    assert "ranges of age,bmi, at an epsilon of at most 0.5" in answer("what leaves", ranges="age,bmi epsilon=0.5")
