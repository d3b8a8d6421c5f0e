"""The group privacy paper's settings, where the app's defaults are others: what many tests begin from."""

from __future__ import annotations

from typing import Any

import pytest

from umbel.protocol.release import Clipping
from umbel.protocol.run_config import RunConfig
from umbel.protocol.tasks import TrainingSpec

PAPER: dict[str, Any] = {
    "clients-per-round": 7, "max-participations": 0, "local-epochs": 1, "noise-multiplier": 5.0,
    "choice-epsilon": 0.0, "clipping": "update norm=1.0 decay=1.0",
}  # fmt: skip
ACCEPTED = {"clipping": "any", "max-choice-epsilon": "inf", "budget": "inf"}
"""What a site's policy says that accepts them."""


def paper_run(**entries: Any) -> dict[str, Any]:
    """Return a whole run config of the paper's settings, with some entries; hyphens are written as underscores."""
    return RunConfig().entries() | PAPER | {key.replace("_", "-"): value for key, value in entries.items()}


def paper_task(**fields: Any) -> TrainingSpec:
    """Return a task of the paper's settings, with some fields."""
    settings: dict[str, Any] = {
        "local_epochs": 1, "noise_multiplier": 5.0, "clipping": Clipping.UPDATE, "choice_epsilon": 0.0,
    }  # fmt: skip
    return TrainingSpec(**settings | fields)


@pytest.fixture(autouse=True)
def sites_accept_the_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in ACCEPTED.items():
        monkeypatch.setenv(f"UMBEL_{key.replace('-', '_').upper()}", value)
