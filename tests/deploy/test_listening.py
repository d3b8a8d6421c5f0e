"""The options of Flower's commands, and ports that are taken."""

from __future__ import annotations

import socket

import pytest

from tests.helpers.errors import raises
from tests.helpers.ports import free_port
from umbel.deploy.listening import check_port, option
from umbel.protocol.errors import ServerError, SiteError


@pytest.mark.parametrize(
    ("arguments", "port"),
    [
        ([], "9094"),
        (["--port", "7"], "7"),
        (["--port=8", "--host", "0.0.0.0"], "8"),
        (["--port"], "9094"),
        (["--port=8", "--port", "9"], "9"),
    ],
)
def test_an_option_has_its_last_value(arguments: list[str], port: str) -> None:
    assert option(arguments, "--port", "9094") == port


def test_a_port_that_is_taken_is_named_and_a_free_one_passes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with raises(SiteError, "site.port", port, "--port"):
            check_port(SiteError, "127.0.0.1", str(port))
    check_port(SiteError, "127.0.0.1", str(free_port()))


@pytest.mark.parametrize(("host", "port"), [("192.0.2.7", "9"), ("127.0.0.1", "x"), ("127.0.0.1", "99999999")])
def test_an_address_at_which_nothing_can_listen_is_named(host: str, port: str) -> None:
    with raises(ServerError, "server.port", port):
        check_port(ServerError, host, port)
