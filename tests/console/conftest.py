"""Sites whose books the tests of the console read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands.test_requests import Site
from tests.helpers.messages import refused
from umbel.console.books import Books
from umbel.privacy.site.config import Site as GateSite
from umbel.privacy.site.journal import Journal
from umbel.protocol.release import Clipping

# A participation costs a pure epsilon of 2 n / nu + choice-epsilon = 2 * 2 / 5 + 1 = 1.8.
EPSILON = 1.8
PUBLIC: dict[str, Any] = {"clipping": Clipping.PUBLIC, "clip_norm": 1.0, "choice_epsilon": 1.0}
RUN: dict[str, Any] = {
    "clipping": "public norm=1.0", "choice-epsilon": 1.0, "rounds": 5, "max-participations": 3,
}  # fmt: skip


@pytest.fixture
def site(tmp_path: Path, run_config: dict[str, Any]) -> Site:
    """A site that approved a run, in which client 0 took part twice and client 1 once."""
    Journal.create(tmp_path / "ledger.jsonl")
    limits = {"budget": 8.0, "max-choice-epsilon": 2.0, "clipping": "public"}
    site = Site(tmp_path, run_config | RUN, **limits)
    site.query()
    site.run("approve", site.waiting[0], "--by", "Dr. Day", "--reason", "trial 7")
    for clients in ((0, 1), (0,)):
        assert not refused(site.train(clients=clients, **PUBLIC))
    for context in site.grid.contexts.values():
        context.run_config, context.run_id = run_config | RUN | {"rounds": 2}, 2
    site.query()
    return site


def books(site: Site) -> Books:
    [config] = [context.node_config for context in site.grid.contexts.values()]
    return Books(site.ledger, GateSite.of(config))
