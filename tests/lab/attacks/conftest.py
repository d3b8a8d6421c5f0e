"""Sites accept the papers' settings."""

from tests.helpers.paper import sites_accept_the_paper as sites_accept_the_paper
