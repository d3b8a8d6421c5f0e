"""One command for a site's SuperNode and its executor; that it works, `test_processes.py` sees."""

from __future__ import annotations

import pytest

from deployment import node
from protocol.errors import SiteError


@pytest.mark.parametrize(
    ("arguments", "port"),
    [([], "9094"), (["--port", "7"], "7"), (["--port=8", "--host", "0.0.0.0"], "8"), (["--port"], "9094")],
)
def test_it_reads_where_the_supernode_waits(arguments: list[str], port: str) -> None:
    assert node._option(arguments, "--port", "9094") == port


@pytest.mark.parametrize("option", ["--isolation=subprocess", "--superexec-auth-secret-file"])
def test_what_would_run_the_servers_code_cannot_be_asked_for(option: str) -> None:
    with pytest.raises(SiteError, match=f"{option.split('=')[0]} is set by this command; leave it out"):
        node.start([option])
