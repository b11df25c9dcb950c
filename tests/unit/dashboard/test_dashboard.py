"""The page of a job: what it shows, to whom, and that nothing on it is taken for markup."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from support.daemons import daemon_of, turn_until
from support.memory_tier import FakeJob

from flashckpt.checkpoint.catalog import list_checkpoints
from flashckpt.checkpoint.history import SessionRecord, put_incident, read_history, write_series, write_session
from flashckpt.cli import main as cli
from flashckpt.core.incident import Incident, encode
from flashckpt.dashboard import server as serving
from flashckpt.dashboard.gather import PageSource
from flashckpt.dashboard.server import Dashboard, render
from flashckpt.shm.control import Control
from flashckpt.shm.logged_values import LoggedValue, append
from flashckpt.storage.factory import open_store

HOSTILE = "</script><img src=x onerror=\"document.title='taken'\">{{DATA}}&amp;\x1b[31m"
INCIDENT = Incident(id="20261126-051500-0a1b2c", time="2026-11-26T05:15:00", category="memory", rank=1, host=HOSTILE,
                    what=HOSTILE, others=({"doing": HOSTILE, "count": 2, "ranks": "0,2"},), findings=(HOSTILE,))  # fmt: skip
CHROMIUM = shutil.which("chromium")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[FakeJob]:
    """A job with a session that was killed at step 30 and one that was restored from 20, with a curve of each."""
    fake = FakeJob(str(tmp_path / "root"))
    fake.step(20, persist=True)
    store = open_store(fake.root)
    with daemon_of(fake) as daemon:
        turn_until(daemon, lambda: list_checkpoints(store) and read_history(store), "the commit")
    (found,) = read_history(store)
    first = replace(found, step=30, begun_s=1000.0, updated_s=1300.0, end="stopped")
    failure = {"cause": HOSTILE, "host": HOSTILE, "rank": 1, "outcome": "restarted", "total_s": 2.5, "time": "now"}
    second = SessionRecord(generation=2, token="bb", job="fake", host=HOSTILE, begun_s=1310.0, updated_s=1500.0,
                           restored_step=20, step=50, end="ended", failure=failure, first_step_s=4.0)  # fmt: skip
    write_session(store, first)
    write_session(store, second)
    put_incident(store, f"{INCIDENT.id}.json", encode(INCIDENT))
    write_series(store, first.key, {"loss": [(step, 5.0 - step / 20) for step in range(1, 31)]})
    write_series(store, second.key, {"loss": [(step, 5.0 - step / 20) for step in range(21, 51)], HOSTILE: [(21, 1.0)]})
    yield fake
    fake.die()


def fill_ranks(job: FakeJob, number: int) -> None:
    with contextlib.closing(Control.open(job.directory.control_path, rows=number)) as control:
        for rank in range(number):
            row = control.row(rank)
            row.clear()
            row.rank, row.pid, row.generation, row.step = rank, 5000 + rank, 2, 49 if rank == 700 else 50
            row.heartbeat_ns = time.monotonic_ns()


def shown(path: Path, *options: str) -> str:
    """Return the DOM of a page after its program ran in Chromium."""
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", *options]
    done = subprocess.run(
        [*command, f"--user-data-dir={path.parent / 'profile'}", "--virtual-time-budget=2000", "--dump-dom", path.as_uri()],
        capture_output=True, text=True, check=True, timeout=100,
    )  # fmt: skip
    return done.stdout


class Elements(HTMLParser):
    """Tags of a page, and the text of its data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.data, self._in_data = "", False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        self._in_data = ("id", "data") in attrs

    def handle_data(self, data: str) -> None:
        self.data += data if self._in_data else ""

    def handle_endtag(self, tag: str) -> None:
        self._in_data = False


def test_the_page_holds_what_root_and_memory_say(job: FakeJob) -> None:
    fill_ranks(job, 2)
    append(job.directory.path, LoggedValue(2, 51, "loss", 0.125))
    found = PageSource(job.root).document()
    assert (found["summary"]["restarts"], found["summary"]["steps_lost"], found["error"]) == (1, 10, "")
    assert [one["generation"] for one in found["sessions"]] == [1, 2]
    assert found["curves"][1]["points"]["loss"][-1] == (51, 0.125), "what has not reached the root yet"
    assert [(one["step"], one["state"], one["kept"]) for one in found["checkpoints"]] == [
        (20, "committed", "keep_last 3")
    ]
    assert [(one["rank"], one["step"]) for one in found["ranks"]] == [(0, 50), (1, 50)]
    assert [one["verdict"] for one in found["incidents"]] == [INCIDENT.verdict]
    assert PageSource("fake").root == job.root, "a job is known by its id, too"


def test_a_finished_job_is_shown_from_its_root_alone(job: FakeJob) -> None:
    job.die()
    shutil.rmtree(job.directory.path)
    found = PageSource(job.root).document()
    assert (found["job"], found["ranks"], found["summary"]["sessions"]) == (None, [], 2)
    assert len(found["curves"][0]["points"]["loss"]) == 30


def test_a_root_that_goes_away_is_said_and_the_rest_is_shown(job: FakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    source = PageSource(job.root)
    monkeypatch.setattr("flashckpt.dashboard.gather.read_history", lambda store: (_ for _ in ()).throw(OSError("gone")))
    found = source.document()
    assert (found["error"], found["sessions"], found["job"]["job"]) == ("gone", [], "fake")


def test_names_of_others_stay_data_and_nothing_is_fetched(job: FakeJob) -> None:
    text = render(PageSource(job.root).document())
    page = Elements(text)
    assert page.tags.count("script") == 2
    assert "img" not in page.tags
    assert page.addresses == ["#main"]
    assert json.loads(page.data)["sessions"][1]["host"] == HOSTILE
    assert "http" not in re.sub(r"http://www\.w3\.org/2000/svg|http-equiv", "", text.replace(page.data, ""))
    assert "innerHTML" not in text


def test_export_writes_one_file(job: FakeJob, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main(["dashboard", job.root, "--export", str(tmp_path / "run.html")])
    assert done.value.code == 0
    assert "no network needed" in capsys.readouterr().out
    assert json.loads(Elements((tmp_path / "run.html").read_text()).data)["events"] == ""


@pytest.fixture
def running() -> Iterator[Dashboard]:
    count = iter(range(1000))
    with Dashboard(lambda: {"look": next(count), "root": HOSTILE}) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def asked(server: Dashboard, path: str, **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request("GET", path, headers=headers)
    return connection.getresponse()


@pytest.mark.parametrize(
    "path", ["/", "/?token=", "/?token=wrong", "/events", "/events?token=%C3%A4", "/?token=a&token="]
)
def test_without_the_token_nobody_is_answered(running: Dashboard, path: str) -> None:
    answer = asked(running, path)
    assert answer.status == 403
    assert HOSTILE[-8:] not in answer.read().decode()


def test_another_name_for_this_address_is_refused(running: Dashboard) -> None:
    assert asked(running, f"/?token={running.token}", Host="evil.example:80").status == 403


def test_with_the_token_the_page_and_no_other(running: Dashboard) -> None:
    answer = asked(running, f"/?token={running.token}")
    assert answer.status == 200
    assert answer.headers["Cache-Control"] == "no-store"
    assert running.token in json.loads(Elements(answer.read().decode()).data)["events"]
    assert asked(running, f"/page.js?token={running.token}").status == 404
    assert running.server_address[0] == "127.0.0.1"


def test_events_come_as_long_as_the_page_is_open(running: Dashboard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "EVERY_S", 0.01)
    answer = asked(running, f"/events?token={running.token}")
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    lines = [answer.readline().decode() for _ in range(6)]  # every second one is empty
    looks = [json.loads(line.removeprefix("data: "))["look"] for line in lines[::2]]
    assert looks == sorted(set(looks))
    answer.close()


def test_pages_beyond_the_limit_are_refused(running: Dashboard) -> None:
    for _ in range(serving.MOST_PAGES):
        assert running.pages.acquire(blocking=False)
    assert asked(running, f"/events?token={running.token}").status == 503


def test_a_port_that_is_taken_is_an_error_with_a_remedy(
    job: FakeJob, running: Dashboard, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main(["dashboard", job.root, "--port", str(running.server_port)])
    assert done.value.code == 10
    assert "another --port" in capsys.readouterr().err


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_chromium_draws_it_and_runs_nothing_of_others(job: FakeJob, tmp_path: Path) -> None:
    """Seconds long, and the one test that runs the program of the page: what it draws, and what it does not execute."""
    fill_ranks(job, 1000)
    document: dict[str, Any] = PageSource(job.root).document() | {"root": HOSTILE}
    page = tmp_path / "page.html"
    page.write_text(render(document))
    dom = shown(page)
    assert "<title>taken" not in dom
    assert "<img" not in dom
    assert "&lt;/script&gt;&lt;img" in dom
    assert dom.count('role="option"') == 1000
    assert re.search(r'class="rank late"[^>]*aria-label="rank 700: late, step 49', dom)
    assert "1000 ranks on 1 node: 999 on time, 1 late" in dom
    assert dom.count('class="restart"') == 1, "a restart, at the step that it was restored from"
    assert 'aria-label="loss: 60 points, steps 1 to 50' in dom
    assert dom.count("memory: rank 1 on &lt;/script&gt;") == 3, "the verdict, its report, and its place in the timeline"
    assert dom.count("2 in &lt;/script&gt;") == 1
    assert dom.count("<td>stopped</td>") == 1
