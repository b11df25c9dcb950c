"""The page of a run with wandb itself, offline: `make test-wandb`. Nothing is sent anywhere."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.training import run_config

from flashckpt.trainer.train.metrics import StepRecord
from flashckpt.trainer.watch.reporter import Reporter
from flashckpt.trainer.watch.wandb_page import RUN_ID

pytest.importorskip("wandb", reason="wandb is not installed: make test-wandb")


BLOCK, FILE_HEADER, HEADER = 32768, 7, 7
"""Of the file of an offline run: LevelDB's log format (crc32, length, type of each piece) behind a header."""


def records(data: bytes) -> Iterator[bytes]:
    """Return the records of an offline run's file."""
    at, parts = FILE_HEADER, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in {1, 4}:  # whole, or the last piece
            yield parts
            parts = b""


def history(path: Path) -> list[dict[str, Any]]:
    """Return the points of an offline run, as wandb sync would send them."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for data in records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            found.append({name: json.loads(value) for name, value in items.items()})
    return found


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_an_offline_run_and_its_restart_are_one_page_with_each_step_once(tmp_path: Path, capfd: Any) -> None:
    config = run_config(tmp_path, log={"wandb": "project", "wandb_mode": "offline"})
    for after, last in ((0, 5), (3, 8)):
        reporter = Reporter(config, world=1, after=after)
        for step in range(after + 1, last + 1):
            values: dict[str, Any] = {"norm": 1.0, "rate": 0.1, "tokens": 64, "samples": "ab", "seconds": 0.5}
            reporter.step(StepRecord(step=step, loss=float(step), channels={"code": 2.0}, **values))
        reporter.close()
    page = (tmp_path / "log" / RUN_ID).read_text().strip()
    runs = sorted((tmp_path / "log" / "wandb").glob("offline-run-*/*.wandb"))
    assert {path.name for path in runs} == {f"run-{page}.wandb"}
    points = [point for path in runs for point in history(path)]
    assert [(point["_step"], point["train/loss"]) for point in points] == [(n, float(n)) for n in range(1, 9)]
    assert points[0]["throughput/tokens per second"] == 512.0
    assert points[0]["train/loss code"] == 2.0
    assert "wandb:" not in capfd.readouterr().out


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_a_page_without_a_key_or_a_server_costs_points_alone(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # and so no key from a file
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    config = run_config(tmp_path, log={"wandb": "project", "wandb_mode": "online"})
    reporter = Reporter(config, world=1, after=0)
    reporter.step(StepRecord(step=1, loss=1.0, norm=1.0, rate=0.1, tokens=64, samples="ab", seconds=0.5))
    reporter.close()
    assert "wandb cannot be written (UsageError" in caplog.text
    assert (tmp_path / "log" / "trace.jsonl").read_text().count("\n") == 1
