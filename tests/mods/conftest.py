"""What the tests of Mods share."""

from __future__ import annotations

from tests.privacy.gate.conftest import node_log as node_log
from tests.privacy.gate.conftest import sites_accept_the_paper as sites_accept_the_paper
