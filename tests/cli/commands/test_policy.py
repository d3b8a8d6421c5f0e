"""`umbel site policy` says in words what a policy allows, promises and leaves out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.cli import refused, said
from umbel.console.page import explained
from umbel.privacy.mechanisms import MECHANISMS
from umbel.privacy.site.policy import Policy

KEY = "AAAAC3NzaC1lZDI1NTE5AAAAII5esJklLdUt2GoWtWkgDFbiKIwOkFmx72zoQsuZiyZb"
NOTHING = "Nothing that this policy allows."


def answer(question: str, entries: dict[str, object]) -> str:
    return dict(explained(Policy.parse({key.replace("_", "-"): value for key, value in entries.items()})))[question]


def test_a_file_is_checked_and_explained(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text(f'budget = 4\n[researchers]\nann = "ssh-ed25519 {KEY} x"\n# end\n')
    told = " ".join(said("site", "policy", file).split())
    digest = Policy.parse({"budget": 4, "researchers": f"ann={KEY}"}).digest
    assert not [part for part in (digest, "epsilon of 4,", "signed are answered: ann") if part not in told]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("budget = -4", "wrong-value"),
        ("allow-unsanitised = true", "allow-unsanitised"),
        ("min-noise-multiplier = 0", "not-positive"),
        ("insecure-seed = true", "insecure-seed"),
        ("place = '9/2'", "place"),
        ("keep-model = 'models'", "relative-path"),
    ],
)
def test_a_policy_that_closes_a_site_is_not_explained(text: str, code: str, tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(f"{text}\n# end\n")
    refused(f"site.{code}", "site", "policy", tmp_path / "policy.toml")


@pytest.mark.parametrize(
    ("question", "entries", "told"),
    [
        ("what is not covered", {}, NOTHING),
        ("what is not covered", {"mechanisms": " ".join(MECHANISMS), "budget": "8 delta=1e-5"}, NOTHING),
        ("what is not covered", {"budget": "inf"}, "no budget"),
        ("what is not covered", {"clipping": "any"}, "clipping depends on the data"),
        ("what is not covered", {"max_choice_epsilon": "inf"}, "which group"),
        ("what is not covered", {"role": "split", "reports": "exact=true"}, "exact losses"),
        ("what is not covered", {"insecure_seed": True}, "seed"),
        ("what is not covered", {"mechanisms": "laplace mine:Noise"}, "mine:Noise"),
        ("what is not covered", {"app": "mine.client_app:app"}, "mine.client_app:app"),
        ("what leaves", {}, "single clients"),
        ("what leaves", {"release": "site", "min_clients": 25}, "at least 25 clients"),
        ("what leaves", {"role": "validation"}, "mean loss"),
        ("what leaves", {"ranges": "age,bmi epsilon=0.5"}, "ranges of age,bmi, at an epsilon of at most 0.5"),
        ("who may ask", {}, "server alone"),
        ("who may ask", {"approve": "ask"}, "people approve"),
        ("who may ask", {"researchers": f"ann={KEY}"}, "Every other run waits"),
    ],
)
def test_what_is_not_covered_what_leaves_and_who_may_ask_follow_from_the_entries(
    question: str, entries: dict[str, object], told: str
) -> None:
    assert told in answer(question, entries)
    assert "ranges" not in answer("what leaves", {})
    assert "single clients" not in answer("what leaves", {"role": "validation"})
