"""Flower's processes with umbel's parts in them: what is replaced is used, and what guards fails closed."""

from __future__ import annotations

import importlib
import subprocess
import sys
from inspect import signature
from types import ModuleType, SimpleNamespace

import pytest

from tests.helpers import flower_parts
from umbel.deploy import flower


def test_an_executor_has_the_methods_that_flower_calls() -> None:
    flowers, ours = flower_parts.found("flwr.supercore.superexec.executor.types:Executor"), flower._Executor
    methods = {name for name in vars(flowers) if not name.startswith("_")}
    assert methods == {name for name in vars(ours) if not name.startswith("_")}
    for name in methods:
        parameters = signature(getattr(flowers, name)).parameters.values()
        asked = [one for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
        signature(getattr(ours, name)).bind(*asked)


def test_parts_of_flower_are_replaced_only_where_it_uses_them(caplog: pytest.LogCaptureFixture) -> None:
    """Else it would do what it does by itself: install the bundle and run it. What only saves time is left out."""
    module = ModuleType("module")
    exec("def work():\n    return part()", vars(module))
    with pytest.raises(RuntimeError, match="Flower's work no longer uses another"):
        flower._replace(module, module.work, another=lambda: 1)
    flower._replace(module, module.work, part=lambda: 7)
    assert module.work() == 7
    flower._replace(module, module.work, saves_time=True, another=lambda: 1)
    assert "no longer uses another" in caplog.text
    assert not hasattr(module, "another")


def test_a_superlink_looks_for_dead_processes_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for the state of a run in almost every request; to look, it writes to its database."""
    state = importlib.import_module("flwr.supercore.corestate.sql_corestate").SqlCoreState
    linkstate = importlib.import_module("flwr.server.superlink.linkstate.sql_linkstate").SqlLinkState
    assert linkstate._cleanup_expired_task_tokens is state._cleanup_expired_task_tokens
    assert "_cleanup_expired_task_tokens" in linkstate.get_run_status.__code__.co_names
    now, looks = [0.0], list[object]()
    monkeypatch.setattr(flower, "time", SimpleNamespace(monotonic=lambda: now[0]))
    seldom = flower._seldom(looks.append, 1.0)
    for now[0] in (0.0, 0.5, 0.9, 1.0, 1.5, 7.0):
        seldom(now[0])
    assert looks == [0.0, 1.0, 7.0]


def test_an_executor_without_a_task_looks_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waited = [0.0], list[float | str]()
    monkeypatch.setattr(flower, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=waited.append))
    executor = flower._Executor(lambda _: None, lambda: waited.append("kept"), lambda: "accepted")
    for now[0] in (0.0, 4.0, 3600.0):
        executor.reconcile()
    assert executor.launch("a task") == "accepted"
    executor.reconcile()
    assert waited == ["kept", 0.0, "kept", pytest.approx(0.2), "kept", 1.0, "kept", 0.0]


CALLED = """
import http.server, threading
from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse
from flwr.supercore.protobuf.client import ProtobufClient
from umbel.deploy.flower import watch_calls

asked = []
class Server(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        asked.append((self.path, self.headers["signed"]))
        self.send_response(302 if self.path == '/' else 503 if len(asked) < 3 else 200)
        self.send_header('Location', '/inside')
        self.send_header('Content-Length', '0')
        self.end_headers()
    do_GET = do_POST
    def log_message(self, *_): pass

class Signs:
    number = 0
    def intercept(self, context, call_next):
        assert "signed" not in context.request.headers, "Flower refuses that"
        self.number += 1
        context.request.headers["signed"] = str(self.number)
        return call_next(context)

server = http.server.HTTPServer(('127.0.0.1', 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = ProtobufClient(f'http://127.0.0.1:{server.server_port}', interceptors=[Signs()])
def call(path):
    asked.clear()
    call = dict(rpc_method='', request=PullMessagesRequest(), response_type=PullMessagesResponse)
    try:
        client._unary_unary(path=path, **call)
        print('answered', *asked)
    except Exception as error:
        print(error.response.status_code, *asked)
"""


def test_a_server_cannot_send_a_site_elsewhere_and_a_link_may_repeat_a_call_signed_anew() -> None:
    """Neither to another address nor from https to http: what comes back is the redirect, an error."""
    code = """
class Link:
    def works(self): print('works')
    def fails(self, error):
        print('fails', error.response.status_code)
        return error.response.status_code == 503
call('/')
watch_calls(Link())
call('/')
call('/pull')
"""
    done = subprocess.run([sys.executable, "-c", CALLED + code], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    before, *after = done.stdout.splitlines()
    assert "/inside" in before
    assert after == [
        "fails 302", "302 ('/', '2')", "fails 503", "fails 503", "works",
        "answered ('/pull', '3') ('/pull', '4') ('/pull', '5')",
    ]  # fmt: skip
