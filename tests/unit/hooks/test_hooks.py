"""The scheduler's hook: what is told, to a command or a webhook, and what one that fails costs: its record alone."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.daemons import daemon_of, steps, turn_until
from support.memory_tier import FakeJob
from support.ranks import wait_for

from flashckpt.core.incident import Incident, as_values
from flashckpt.environment import Environment
from flashckpt.errors import ConfigError
from flashckpt.hooks import sender
from flashckpt.hooks.sender import COMMITTED, INCIDENT, UNHEALTHY, Hook, of_incident

LOG = logging.getLogger("test.hook")
LOST = {"node": 1, "host": "h1", "ranks": "2-3", "silent_s": 7.2, "answers": False}


def found(**fields: Any) -> dict[str, Any]:
    return as_values(Incident(id="20261126-053533-fa05fd", time="now", job="run7", **fields))


def tell(hook: Hook, number: int = 1) -> None:
    hook.tell(COMMITTED, id=f"run7-1-{number}", job="run7", root="/r", generation=1, step=number)


@pytest.fixture
def told(tmp_path: Path) -> Path:
    return tmp_path / "told"


@contextlib.contextmanager
def webhook(code: int = 200) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """A webhook that answers with `code`; the URL holds a secret."""
    got: list[tuple[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.append((self.headers["Content-Type"], json.loads(body)))
            self.send_response(code)
            self.send_header("Location", f"http://127.0.0.1:{server.server_port}/elsewhere")
            self.end_headers()

        def do_GET(self) -> None:
            got.append(("a redirect was followed", {"step": -1}))

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/hook?token=s3cret", got
        finally:
            server.shutdown()
            thread.join()


def test_a_command_reads_one_record_for_each_event(told: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHCKPT_HOOK", f"sh -c 'cat >> {told}; echo ${{FLASHCKPT_JOB_SECRET-none}} >> {told}.secret'")
    monkeypatch.setenv("FLASHCKPT_JOB_SECRET", "of agents and ranks alone")
    hook = Hook(LOG)
    tell(hook, 10)
    tell(hook, 20)
    hook.close(60)
    first, second = (json.loads(line) for line in told.read_text().splitlines())
    assert first | {"time": "", "sender": ""} == {
        "event": "checkpoint committed", "version": 1, "id": "run7-1-10", "time": "", "job": "run7", "sender": "",
        "node": -1, "host": "", "reason": "", "root": "/r", "generation": 1, "step": 10, "incident": {},
    }  # fmt: skip
    assert (second["step"], told.with_suffix(".secret").read_text()) == (20, "none\nnone\n")


def test_a_webhook_is_posted_the_record() -> None:
    with webhook() as (url, got):
        hook = Hook(LOG, [url])
        tell(hook)
        hook.close(60)
    ((kind, record),) = got
    assert (kind, record["event"], record["step"]) == ("application/json", COMMITTED, 1)


@pytest.mark.parametrize("code", [500, 302])
def test_a_webhook_that_refuses_is_named_once_and_its_url_never(code: int, caplog: pytest.LogCaptureFixture) -> None:
    with webhook(code) as (url, got):
        hook = Hook(LOG, [url])
        for number in range(3):
            tell(hook, number)
        hook.close(60)
    assert [record["step"] for _, record in got] == [0, 1, 2], "nothing is sent twice or elsewhere"
    assert caplog.messages == [f"the hook failed: the webhook answered {code}; training does not depend on it"]
    Hook(LOG, [url])._report(Hook(LOG, [url])._post(b"{}"))
    assert "Connection refused" in caplog.messages[-1]
    assert "s3cret" not in caplog.text


@pytest.mark.parametrize(
    ("words", "problem"),
    [(["false"], "false ended with exit code 1"), (["/is/not/there"], "FileNotFoundError: [Errno 2] No such file")],
)
def test_a_command_that_fails_is_named_once(words: list[str], problem: str, caplog: pytest.LogCaptureFixture) -> None:
    hook = Hook(LOG, words)
    for number in range(3):
        tell(hook, number)
    hook.close(60)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(f"the hook failed: {problem}")


def test_a_command_that_hangs_is_killed_with_what_it_started(
    told: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sender, "DELIVERY_S", 0.3)
    hook = Hook(LOG, ["sh", "-c", f"sleep 1000 & echo $! > {told}; wait"])
    tell(hook)
    hook.close(60)
    assert "sh was killed after 0.3 s" in caplog.text
    pid = int(told.read_text())
    wait_for(
        lambda: not Path(f"/proc/{pid}").exists() or ") Z " in Path(f"/proc/{pid}/stat").read_text(), what="its end"
    )


def test_records_that_wait_are_bounded_and_the_end_does_not_wait_for_ever(
    told: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sender, "MOST_DUE", 2)
    hook = Hook(LOG, ["sh", "-c", f"while ! test -e {told}; do sleep 0.01; done"])
    for number in range(6):
        tell(hook, number)
    hook.close(0.01)
    told.touch()
    assert "2 records wait for it: more are dropped" in caplog.messages[0]
    assert "still at work after 0.01 s" in caplog.messages[1]
    hook.close(60)


def test_an_incident_tells_which_nodes_to_leave_out() -> None:
    (lone,) = of_incident(found(category="script", node=0, host="h0", rank=1, step=9, what="exit code 1"))
    assert (lone["event"], lone["host"], lone["step"], lone["incident"]["class"]) == (INCIDENT, "h0", 9, "script")
    for fields in (
        {"category": "network", "lost": (LOST,)},
        {"category": "machine", "node": 1, "host": "h1", "what": "ECC"},
    ):
        incident, node = of_incident(found(**fields))
        assert incident["reason"] == incident["incident"]["verdict"]
        assert (node["event"], node["node"], node["host"]) == (UNHEALTHY, 1, "h1")
        assert node["id"] == "20261126-053533-fa05fd-h1"


def test_the_persister_of_the_first_node_tells_commits_of_this_session(
    told: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHCKPT_HOOK", f"sh -c 'cat >> {told}'")
    job = FakeJob(str(told.parent / "root"))
    job.step(10, persist=True)
    with daemon_of(job) as daemon:
        turn_until(daemon, lambda: steps(job) == [10], "the commit")
    (line,) = told.read_text().splitlines()
    record = json.loads(line)
    assert (record["event"], record["id"], record["root"]) == (COMMITTED, "fake-1-10", job.root)
    job.die()
    again = FakeJob(job.root, generation=2)
    with daemon_of(again) as daemon:
        turn_until(
            daemon, lambda: daemon.persisting and daemon.persisting.committed, "the commit of the session before"
        )
    assert told.read_text().splitlines() == [line]
    again.die()


def test_a_hook_that_is_no_command_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError, match="FLASHCKPT_HOOK") as raised:
        Environment({"FLASHCKPT_HOOK": "sh -c 'not closed"}).check("dlrun")
    assert "not closed" not in str(raised.value)
