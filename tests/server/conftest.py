"""What tests of the server share: sites that accept the paper's settings."""

from __future__ import annotations

from tests.helpers.paper import sites_accept_the_paper as sites_accept_the_paper
