"""What the tests of channels share with those of the gate."""

from __future__ import annotations

from tests.helpers.paper import sites_accept_the_paper as sites_accept_the_paper
from tests.privacy.site.conftest import node_log as node_log
