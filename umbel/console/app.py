"""``umbel site console``: a page on this machine where a site's people read its books and decide on requests.

It listens on loopback alone. Its address holds a secret: whoever does not know it, such as another user of the machine
or a page in the same browser, gets nothing. There is no cookie, which another port of this machine would be sent too.
"""

from __future__ import annotations

import hmac
import secrets
import socket
from contextlib import suppress
from typing import Annotated
from urllib.parse import parse_qsl

import typer
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from umbel.console.books import Books
from umbel.console.page import Chosen, render
from umbel.privacy.gate.consent import decide
from umbel.privacy.gate.runs import Status
from umbel.protocol.cli import command_line, errors_in_one_line
from umbel.protocol.errors import SiteError, UmbelError

_HOST = "127.0.0.1"
_VERBS = {"approve": Status.APPROVED, "refuse": Status.REFUSED}
_LONGEST_FORM = 10_000
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}


def console(books: Books, port: int, token: str) -> Starlette:
    """Return the app that serves the page of a site, with its books as they are then, under its secret `token`."""
    hosts = {f"{_HOST}:{port}", f"localhost:{port}"}

    def known(request: Request) -> bool:
        # Another name for this address would be a page's attempt to get around the browser's rules.
        own = request.headers.get("host", "") in hosts
        origin = request.headers.get("origin")
        same = origin is None or origin.removeprefix("http://") in hosts
        return own and same and hmac.compare_digest(request.path_params["token"].encode(), token.encode())

    def nothing() -> Response:
        return PlainTextResponse("not found", 404, _HEADERS)

    async def show(request: Request) -> Response:
        if not known(request):
            return nothing()
        chosen = Chosen(request.query_params.get("run", ""), request.query_params.get("decision", ""))
        try:
            page = render(books.now(), token, request.query_params.get("told", "")[:300], chosen)
        except UmbelError as error:
            return PlainTextResponse(f"Error: {error}", 503, _HEADERS)
        return HTMLResponse(page, headers=_HEADERS)

    async def answer(request: Request) -> Response:
        if not known(request):
            return nothing()
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > _LONGEST_FORM:
                return PlainTextResponse("the form is too long", 413, _HEADERS)
        form = {name: value.strip() for name, value in parse_qsl(body.decode("utf-8", "replace"))}
        verb, person = _VERBS.get(form.get("decision", "")), form.get("person", "")
        if verb is None or not person:
            return PlainTextResponse("say who decides, and approve or refuse", 400, _HEADERS)
        try:
            who, why = person[:100], form.get("reason", "")[:200]
            decided = decide(books.ledger, form.get("request", ""), verb, who, why, form.get("seen"))
            told = f"Request {decided.digest[:8]} is {decided.status}."
        except UmbelError as error:
            told = f"Error: {error}"
        return RedirectResponse(request.url_for("show", token=token).include_query_params(told=told), 303, _HEADERS)

    routes = [
        Route("/{token}/", show, methods=["GET"], name="show"),
        Route("/{token}", show, methods=["GET"]),
        Route("/{token}/decide", answer, methods=["POST"]),
    ]
    served = Starlette(routes=routes, exception_handlers={404: lambda *_: nothing(), 405: lambda *_: nothing()})
    served.router.redirect_slashes = False  # which would answer strangers
    return served


def main(
    node_config: Annotated[
        str, typer.Argument(metavar="NODE_CONFIG", help="The node's configuration, as for umbel site check.")
    ] = "",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port on this machine.")] = 8321,
) -> None:
    """Open a page on this machine where the site's people read its books and decide on requests.

    Only this machine reaches it, by an address with a secret, which is printed. It ends with Ctrl-C.
    """
    with errors_in_one_line():
        books = Books.of(node_config)
        _ = books.nearest(0), books.lines  # a damaged ledger or log is named here
        with _listening(port) as place, suppress(KeyboardInterrupt):
            # Printed once no other process can listen there and be given the secret.
            token = secrets.token_urlsafe(32)
            typer.echo(f"http://{_HOST}:{port}/{token}/")
            server = uvicorn.Server(uvicorn.Config(console(books, port, token), http="h11", log_level="error"))
            server.run(sockets=[place])


def _listening(port: int) -> socket.socket:
    """Return a socket that listens at a port of this machine alone."""
    try:
        return socket.create_server((_HOST, port))
    except OSError as error:
        text = f"nothing can listen at {_HOST}:{port} ({error.strerror}); choose another --port"
        raise SiteError(text, code="site.port") from None


app = command_line(main)
