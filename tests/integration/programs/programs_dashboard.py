"""`flashckpt dashboard` in a real Chromium (make test-programs): live beside a job, of a finished job on S3, at 1,000 ranks, and
with hostile words in every field. DASHBOARD_SHOTS names a folder for pictures.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.browser import CHROMIUM, Page, browser, dashboard
from support.dlrun import ENGINE, dlrun, first_steps
from support.ranks import wait_for
from support.s3 import moto_server

from flashckpt.checkpoint.history import RANKS, SessionRecord, put_incident, write_series, write_session
from flashckpt.core.incident import Incident, encode
from flashckpt.core.rank_table import RankTimes, encode_table
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.dashboard.gather import PageSource
from flashckpt.dashboard.server import Dashboard
from flashckpt.errors import RESUME_EXIT_CODE
from flashckpt.storage.factory import open_store
from flashckpt.storage.store import Store

pytestmark = [pytest.mark.timeout(300), pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]
HOSTILE = "</script><img src=x onerror=\"document.title='taken'\"><b id=taken>"
T0 = 1_795_667_400.0


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with browser(tmp_path / "profile") as found:
        yield found


@contextlib.contextmanager
def served(look: Any) -> Iterator[Dashboard]:
    with Dashboard(look) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def shot(page: Page, name: str, **options: Any) -> None:
    if folder := os.environ.get("DASHBOARD_SHOTS"):
        page.shot(Path(folder) / f"{name}.png", **options)


LOGGED = ENGINE.replace(
    "    ckpt.step(step)\n", '    ckpt.step(step)\n    ckpt.log("loss", loss)\n    ckpt.phases(data=0.001)\n'
)


def test_started_beside_a_job_a_restart_is_seen_live_and_a_wrong_token_is_refused(page: Page, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOGGED)
    with dlrun(tmp_path, "--nproc-per-node=2", tmp_path / "train.py", tmp_path, 100000, 0.05) as launch:
        pids = launch.until(lambda: first_steps(tmp_path, 0, 2), "2 ranks")
        launch.until(lambda: list((tmp_path / "root" / "history").glob("0*")), "the session on the root")
        with dashboard(tmp_path / "root") as address:
            page.open(address)
            page.until("document.getElementById('state').innerText === 'running, generation 1'")
            page.until("document.querySelectorAll('#ranks .rank').length === 2")
            page.until("document.querySelectorAll('#curves path.curve').length === 1")
            page.value("window.stays = 1")
            os.kill(pids[1], signal.SIGKILL)
            page.until("document.getElementById('state').innerText === 'running, generation 2'")
            page.until("document.querySelectorAll('#incidents details').length === 1")
            page.until("document.querySelectorAll('#curves path.restart').length === 1")
            assert "unknown: rank 1 (pid" in page.text("incidents")
            assert page.text("tiles").split("Restarts\n")[1][0] == "1"
            assert page.value("window.stays") == 1, "it was not loaded again"
            page.open(address.partition("=")[0] + "=wrong")
            assert page.value("document.body.innerText").startswith("403: use the address that")
        launch.process.send_signal(signal.SIGTERM)
        assert launch.wait() == RESUME_EXIT_CODE, launch.output


def session(number: int, begun_s: float, ran_s: float, first: int, last: int, **fields: Any) -> SessionRecord:
    return SessionRecord(generation=number, token=f"t{number}", job="run7", host="gpu-000", world_size=1000, nodes=125,
                         begun_s=T0 + begun_s, updated_s=T0 + begun_s + ran_s, restored_step=first, step=last, stall_s=ran_s / 300,
                         snapshots=int(ran_s / 8), **fields)  # fmt: skip


def times_of_1000() -> list[RankTimes]:
    """All alike but node 41, whose loading is slow, and rank 777, which is a little so."""
    found = []
    for rank in range(1000):
        slow = rank // 8 == 41
        data = 0.02 + rank * 7 % 13 / 5000 + 0.07 * slow + 0.012 * (rank == 777)
        seconds = {
            "data": data,
            "forward": 0.18 + rank * 5 % 11 / 2000,
            "backward": 0.37 - 0.06 * slow,
            "optimizer": 0.021,
        }
        found.append(RankTimes(rank=rank, pid=4000 + rank, step=4210, node=rank // 8, host=f"gpu-{rank // 8:03d}", step_s=0.61,
                               seconds=seconds, slow="data" if slow else ""))  # fmt: skip
    return found


def fill(store: Store) -> None:
    """Write what a job of three sessions leaves on its root: killed by the OOM killer, then a lost node, then it ended."""
    killed = {"cause": "rank 27 on gpu-003: signal 9 (SIGKILL)", "host": "gpu-003", "rank": 27, "step": 1812,
              "outcome": "restarted", "total_s": 49.1, "time": "2026-11-26T05:13:20"}  # fmt: skip
    lost = {"cause": "node gpu-088 is gone", "host": "gpu-088", "rank": -1, "step": 3300, "outcome": "restarted",
            "total_s": 180.0, "time": "2026-11-26T05:45:00"}  # fmt: skip
    sessions = (
        session(1, 0, 2600, -1, 1812, end="stopped", first_step_s=41),
        session(2, 2640, 1860, 1810, 3300, end="stopped", first_step_s=9.2, failure=killed),
        session(3, 4620, 1780, 2900, 4210, end="ended", committed=SnapshotId(3, 4200), first_step_s=60, failure=lost),
    )
    for one in sessions:
        write_session(store, one)
        first = max(one.restored_step, 0)
        points = {
            "loss": [(step, 2 + 9 * 0.9984**step + step * 37 % 17 / 150) for step in range(first + 1, one.step, 6)]
        }
        points["job/steps not on storage"] = [(step, float(step % 200)) for step in range(first + 1, one.step, 20)]
        points["job/data seconds"] = [(step, 0.022 + step * 37 % 17 / 5000) for step in range(first + 1, one.step, 60)]
        write_series(store, one.key, points)
    store.put(sessions[-1].key + RANKS, encode_table(times_of_1000(), T0 + 6400))
    waiting = ({"doing": "all_reduce", "count": 999, "ranks": "0-26,28-999"},)
    for found in (
        Incident(id="20261126-051320-0a1b2c", time="2026-11-26T05:13:20.000+00:00", job="run7", category="memory", node=3,
                 host="gpu-003", rank=27, pid=2210, step=1812, what="signal 9 (SIGKILL)", others=waiting, action="restart",
                 findings=("gpu-003: Out of memory: Killed process 2210 (python)",),
                 reason="restarting all workers, 9 of 10 restarts are left"),
        Incident(id="20261126-060500-0a1b2d", time="2026-11-26T06:05:00.000+00:00", job="run7", kind="straggler", category="data",
                 node=41, host="gpu-041", step=3900, action="continue", reason="all other ranks wait for its ranks in each step",
                 what="slow in data for 60 s: 0.0914 s of each step, the median of the ranks is 0.0212 s"),
    ):  # fmt: skip
        put_incident(store, f"{found.id}.json", encode(found))


def test_finished_job_is_opened_from_s3_and_1000_ranks_are_scrolled_by_keys(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    with moto_server() as server:
        for name, value in {
            "AWS_ENDPOINT_URL": server.endpoint,
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "y",
        }.items():
            monkeypatch.setenv(name, value)
        root = f"s3://{server.bucket}/run7"
        fill(open_store(root))
        with served(PageSource(root).document) as server_of_page:
            page.open(server_of_page.url)
            assert page.text("state").startswith("ended at step 4210")
            assert page.value("document.querySelectorAll('#curves path.restart').length") == 2
            assert page.value("document.querySelectorAll('#curves rect.lost').length") == 2
            assert "by node gpu-088 is gone (1x)" in page.text("losses")
            assert "1000 ranks on 125 nodes: 992 on time, 8 slow." in page.text("rank-note")
            shot(page, "dashboard-whole")
            page.value("document.querySelector('#incidents details').open = true")
            assert "continue: all other ranks wait for its ranks" in page.text("incidents")
            page.value("document.getElementById('by').value = 'data'")
            page.value("document.getElementById('by').dispatchEvent(new Event('change'))")
            assert page.value("document.querySelectorAll('#ranks .heat5').length") == 8
            page.value("document.getElementById('ranks').focus()")
            page.press("End", 35)
            assert page.text("rank").startswith("rank 999 on gpu-124: on time, step 4210")
            in_view = "(() => { const one = document.querySelector('.chosen').getBoundingClientRect(), box = document.getElementById("
            in_view += (
                "'ranks').getBoundingClientRect(); return one.top >= box.top && one.bottom <= box.bottom + 1; })()"
            )
            assert page.value(in_view)
            page.press("ArrowUp", 38)
            assert page.text("rank").startswith("rank 991 on gpu-123")
            page.press("Home", 36)
            assert page.text("rank").startswith("rank 0 on gpu-000")
            assert "data 20.0 ms (median" in page.text("rank")
            names = {one["role"]["value"]: one.get("name", {}).get("value") for one in page.ask("Accessibility.getFullAXTree")["nodes"]
                     if one.get("role", {}).get("value") in ("listbox", "image", "combobox")}  # fmt: skip
            assert names["listbox"] == "Ranks"
            assert names["combobox"] == "Colour by"
            assert all(names.values()), "a picture without words"
            shot(page, "dashboard", height=970)
            top = int(page.value("document.getElementById('h-ran').getBoundingClientRect().top + scrollY"))
            shot(page, "dashboard-ranks", top=top - 20, height=700, dark=True)
            shot(page, "dashboard-narrow", width=420)


def hostile(value: Any) -> Any:
    """Return a document with the same shape whose every text, and every name that its writer chose, is hostile."""
    if isinstance(value, str):
        return HOSTILE
    if isinstance(value, (list, tuple)):
        return [hostile(one) for one in value]
    return {name: hostile(one) for name, one in value.items()} if isinstance(value, dict) else value


def test_hostile_names_in_every_field_are_shown_as_text(page: Page, tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "root"))
    fill(store)
    found = hostile(PageSource(store.url).document())
    for one in found["curves"]:
        one["points"] = {HOSTILE: one["points"]["loss"], "job/" + HOSTILE: one["points"]["loss"]}
    for one in found["ranks"]:
        one["seconds"] = {HOSTILE: 0.1}
    found["summary"] |= {"down_by_cause": {HOSTILE: 1.0}, "restarts_by_cause": {HOSTILE: 1}}
    found["checkpoints"] = [
        {"step": 1, "generation": 1, "created_s": T0, "nbytes": 5, "state": HOSTILE, "kept": HOSTILE}
    ]
    with served(lambda: found) as server:
        page.open(server.url)
        page.until("document.querySelectorAll('#checkpoints td').length")
        assert page.value("document.getElementById('taken')") is None
        assert page.value("document.images.length") == 0
        assert page.value("document.title").endswith(HOSTILE)
        for name in ("root", "error", "losses", "curves", "sessions", "incidents", "course", "checkpoints"):
            assert HOSTILE in page.text(name), name
        assert page.value("document.querySelector('.rank').title").count("<img") == 2, (
            "its host, and in what it is slow"
        )


def test_exported_page_shows_the_same_without_a_network(page: Page, tmp_path: Path) -> None:
    store, target = open_store(str(tmp_path / "root")), tmp_path / "run.html"
    fill(store)
    plan = tmp_path / "plan.json"
    plan.write_text('{"intervals": {"goodput": 0.94, "restart": 0.02, "recompute": 0.03, "stall": 0.001}, '
                    '"costs": {"restart_memory_s": 61, "stall_s": 0.02}, "mtbf_s": 9000}')  # fmt: skip
    words = ["dashboard", store.url, "--plan", str(plan), "--export", str(target)]
    command = [sys.executable, "-c", "from flashckpt.cli.entry import main; main()", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    page.ask("Network.enable")
    page.ask("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)
    page.open(target.as_uri())
    assert page.text("state").startswith("ended at step 4210")
    assert "Between two failures\t2.5 h\t53 min" in page.text("plan")
    wait_for(lambda: page.value("document.querySelectorAll('#ranks .rank').length") == 1000, what="the ranks")
