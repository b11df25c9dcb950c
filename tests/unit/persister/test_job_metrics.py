"""What a job has cost, as metrics; the dashboard and the alerts that are shipped ask for metrics that exist."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.daemons import daemon_of, turn_until
from support.memory_tier import FakeJob
from support.paths import ROOT
from support.ranks import wait_for
from support.s3 import free_port

from flashckpt.checkpoint.history import SessionRecord, read_history, read_ranks, write_session
from flashckpt.checkpoint.root_records import claim_generation
from flashckpt.core.rank_table import RankTimes
from flashckpt.daemon.persister.metrics import COUNTERS, GAUGES, class_of
from flashckpt.shm.control import Control
from flashckpt.shm.rank_table import write_table
from flashckpt.storage.factory import open_store

PROMTOOL, PROMETHEUS = shutil.which("promtool"), shutil.which("prometheus")
NAME = re.compile(r"flashckpt_[a-z_]+")


def exposed() -> set[str]:
    """Return the names as Prometheus stores them."""
    return (
        {"flashckpt_restore_seconds", "flashckpt_phase_seconds"}
        | {f"flashckpt_{name}" for name in GAUGES}
        | {f"flashckpt_{name}_total" for name in COUNTERS}
    )


@pytest.fixture
def endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The metrics of a job's third session, whose ranks waited 1.5 s for 6 snapshots."""
    monkeypatch.setenv("FLASHCKPT_METRICS_PORT", "0")
    job = FakeJob(str(tmp_path / "root"), generation=3)
    store = open_store(job.root)
    claim_generation(store, job.record)
    first = SessionRecord(generation=1, token="a", job="fake", begun_s=10, updated_s=20, step=30, end="stopped")
    killed = {"cause": "SIGKILL (9)", "outcome": "restarted"}
    second = SessionRecord(generation=2, token="b", job="fake", begun_s=25, updated_s=40, restored_step=25, step=40,
                           failure=killed, end="stopped")  # fmt: skip
    for one in (first, second):
        write_session(store, one)
    with contextlib.closing(Control.open(job.directory.control_path, rows=2)) as control:
        for rank in range(2):
            row = control.row(rank)
            row.clear()
            row.rank, row.pid, row.generation, row.step, row.restored_step = rank, 9, 3, 40, 38
            row.entered, row.restore_started, row.restored, row.first_step = 10**9, 2 * 10**9, 4 * 10**9, 8 * 10**9
            row.restored_from = 1 + rank
            row.snapshots, row.stall_ns = 6, 10**9 + rank * 5 * 10**8
    times = [
        RankTimes(rank=rank, step=40, step_s=1.0, seconds={"data": 0.25 + rank}, slow="data" * rank)
        for rank in range(2)
    ]
    write_table(job.directory.path, times)
    job.step(40, persist=True)
    with daemon_of(job) as daemon:
        assert daemon.turn() is False
        turn_until(daemon, lambda: daemon.numbers().get("lost_steps"), "the sessions before")
        turn_until(daemon, lambda: daemon.numbers().get("committed_age_seconds"), "a commit")
        assert daemon.endpoint is not None
        turn_until(
            daemon,
            lambda: read_ranks(store, read_history(store)[-1].key) == times,
            "the times of the ranks on the root",
        )
        yield f"127.0.0.1:{daemon.endpoint.port}"
    job.die()


def fetched(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        found: str = answer.read().decode()
    return found


@pytest.fixture
def scraped(endpoint: str) -> str:
    return fetched(f"http://{endpoint}/metrics")


def test_a_job_says_what_it_has_cost(scraped: str) -> None:
    values = dict(re.findall(r'^(flashckpt_\S+?)\{job="fake",node="0"\} (\S+)$', scraped, re.MULTILINE))
    assert values["flashckpt_lost_steps_total"] == "7.0", "5 by the first restart, 2 by the second"
    assert 'flashckpt_restore_seconds{job="fake",node="0",source="peer"} 2.0' in scraped, "the farthest of its ranks"
    assert values["flashckpt_first_step_seconds"] == "7.0"
    assert (values["flashckpt_stall_seconds_total"], values["flashckpt_snapshots_total"]) == ("1.5", "6.0")
    assert 0 <= float(values["flashckpt_goodput_ratio"]) < 1
    assert 'flashckpt_restarts_total{cause="signal",job="fake",node="0"} 1.0' in scraped
    assert 'flashckpt_restarts_total{cause="unknown",job="fake",node="0"} 1.0' in scraped
    assert values["flashckpt_slow_ranks"] == "1.0"
    assert 'flashckpt_phase_seconds{job="fake",node="0",phase="data"} 0.25' in scraped, "of the median rank"
    assert re.search(r'flashckpt_build_info\{job="fake",node="0",version="[0-9.]+"\} 1.0', scraped)


@pytest.mark.parametrize(
    ("cause", "kind"),
    [("killed by SIGKILL", "signal"), ("hang: no step for 60 s", "hang"), ("exit code 1", "exit"), ("weather", "other"),
     ("not known: no dlrun watched it", "unknown")],
)  # fmt: skip
def test_causes_have_few_labels(cause: str, kind: str) -> None:
    assert class_of(cause) == kind


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool (Debian: prometheus)")
def test_names_and_types_are_those_that_promtool_takes(scraped: str) -> None:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, "check", "metrics"], input=scraped, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_alerts_ask_for_metrics_that_exist() -> None:
    path = ROOT / "packaging/alerts.yml"
    asked = set(NAME.findall(path.read_text()))
    assert len(asked) > 6
    assert asked <= exposed()
    if PROMTOOL is not None:
        done = subprocess.run([PROMTOOL, "check", "rules", path], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_the_dashboard_asks_for_metrics_that_exist_and_parse() -> None:
    panels = json.loads((ROOT / "packaging/grafana.json").read_text())["panels"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(asked) > 10
    assert set(NAME.findall(" ".join(asked))) <= exposed()
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}) == len(panels)


def test_each_alert_has_a_line_of_what_to_do() -> None:
    alerts = re.findall(r"alert: (\w+)", (ROOT / "packaging/alerts.yml").read_text())
    page = (ROOT / "docs/operations.md").read_text()
    assert [one for one in alerts if f"| `{one}` |" not in page] == []


def asked(url: str, query: str = "") -> Any:
    """Return what Prometheus answers; None where it does not yet."""
    with contextlib.suppress(OSError):
        return json.loads(fetched(f"{url}?query={urllib.parse.quote(query)}"))["data"]
    return None


@pytest.mark.skipif(PROMETHEUS is None, reason="needs prometheus (Debian: prometheus; make test-metrics)")
def test_a_real_prometheus_scrapes_a_job_and_evaluates_every_alert_and_panel(tmp_path: Path, endpoint: str) -> None:
    assert PROMETHEUS is not None
    (tmp_path / "prometheus.yml").write_text(f"""
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: ["{ROOT}/packaging/alerts.yml"]
scrape_configs:
  - {{job_name: flashckpt, honor_labels: true, static_configs: [{{targets: ["{endpoint}"]}}]}}
""")
    port = free_port()
    words = [PROMETHEUS, f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen([*words, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        api = f"http://127.0.0.1:{port}/api/v1"
        wait_for(
            lambda: (asked(f"{api}/query", 'flashckpt_lost_steps_total{job="fake"}') or {}).get("result"), what="it"
        )
        groups = wait_for(lambda: [g for g in asked(f"{api}/rules")["groups"] if all(r["health"] == "ok" for r in g["rules"])],
                          what="alerts that are evaluated")  # fmt: skip
        assert len(groups[0]["rules"]) == 7
        panels = json.loads((ROOT / "packaging/grafana.json").read_text())["panels"]
        queries = [one["expr"].replace("$run", "fake") for panel in panels for one in panel["targets"]]
        assert [one for one in queries if asked(f"{api}/query", one) is None] == [], "those that it cannot evaluate"
        missing = [one for one in queries if "replica" not in one and not asked(f"{api}/query", one)["result"]]
        assert not [one for one in missing if "rate(" not in one and "increase(" not in one], "panels without a value"
    finally:
        server.kill()
        server.wait()
