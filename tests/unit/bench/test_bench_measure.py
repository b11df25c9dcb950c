"""The measuring code that every figure of this project goes through."""

from __future__ import annotations

import ctypes
import gc
import json
import time
from pathlib import Path

import pytest

from flashckpt.bench import host, measure
from flashckpt.errors import ConfigError, FormatVersionError


def test_percentiles_are_values_that_were_measured() -> None:
    summary = measure.summarise([5.0, 1.0, 4.0, 2.0, 3.0])
    assert (summary.median, summary.min, summary.max, summary.n) == (3.0, 1.0, 5.0, 5)
    assert summary.p95 == 5.0
    assert summary.spread == pytest.approx((4.0 - 2.0) / 3.0)
    assert measure.summarise([1.0, 3.0]).spread == 1.0
    with pytest.raises(ValueError, match="no values"):
        measure.summarise([])


def test_interleaved_cases_take_turns_and_no_case_is_always_first() -> None:
    order: list[str] = []
    cases = {name: (lambda name=name: order.append(name)) for name in "abc"}
    timings = measure.interleave(cases, 4, warmup=1)
    assert {name: len(runs) for name, runs in timings.items()} == {"a": 4, "b": 4, "c": 4}
    rounds = [order[i : i + 3] for i in range(0, len(order), 3)]
    assert len(rounds) == 5
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert {one[0] for one in rounds[1:]} == {"a", "b", "c"}


def nap() -> int:
    time.sleep(0.02)
    return 7


def test_timings_hold_wall_and_cpu_and_result() -> None:
    asleep = measure.timed(nap)
    assert asleep.wall_s >= 0.02
    assert asleep.value == 7
    busy = measure.timed(lambda: sum(range(3_000_000)))
    assert busy.cpu_s > 0


def test_busy_machine_is_marked_and_refused() -> None:
    load = measure.LoadWatch(cores=2, load_before=7.0)
    assert load.report()["loaded"]
    assert "load average 7.0" in load.report()["reasons"][0]
    with pytest.raises(ConfigError, match="too busy") as refusal:
        measure.require_quiet(load)
    assert refusal.value.found == "load average 7.0"
    measure.require_quiet(measure.LoadWatch(cores=2, load_before=1.0))


def test_cpu_time_of_others_is_told_from_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    load = measure.LoadWatch(cores=2, load_before=0.0)
    load._start -= 10.0
    monkeypatch.setattr(measure, "_machine_busy_seconds", lambda: load._busy + 12.0)
    monkeypatch.setattr(measure, "cpu_seconds", lambda: load._own + 11.0)
    assert load.report()["other_cores"] == pytest.approx(0.1, abs=0.02)
    assert not load.report()["loaded"]
    monkeypatch.setattr(measure, "cpu_seconds", lambda: load._own + 1.0)
    assert load.report()["loaded"]


def test_document_carries_machine_and_survives_the_disk(tmp_path: Path) -> None:
    result = measure.document("x", {"ranks": 2}, {"rate": float("nan")}, load=measure.LoadWatch(), paths=[tmp_path])
    assert result["schema"] == measure.SCHEMA
    assert result["host"]["file_systems"][0]["type"]
    path = tmp_path / "result.json"
    measure.write_json(path, result)
    assert measure.read_json(path)["results"] == {"rate": None}
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": "1", "results": {}}', '{"schema": 1}', "\x00"])
def test_file_that_is_no_result_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"other\.json"):
        measure.read_json(path)


def test_newer_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "new.json"
    path.write_text(json.dumps({"schema": measure.SCHEMA + 1, "results": {}}))
    with pytest.raises(FormatVersionError, match="newer"):
        measure.read_json(path)


def test_evicted_file_is_really_out_of_the_page_cache() -> None:
    """Read back by mincore: where the file system ignores the advice (tmpfs) the share says so."""
    path = Path(__file__).parent / f".evict-{time.time_ns()}"
    try:
        path.write_bytes(bytes(8 << 20))
        with path.open("rb") as file:
            assert host.resident_share(file.fileno()) == 1.0
        assert host.evict(path) < 0.1 or host.file_system(path)["type"] in {"tmpfs", "overlay"}
    finally:
        path.unlink(missing_ok=True)


def test_file_on_tmpfs_is_not_claimed_to_be_cold(shm_dir: Path) -> None:
    path = shm_dir / "hot"
    path.write_bytes(bytes(1 << 20))
    if host.file_system(path)["type"] == "tmpfs":
        assert host.evict(path) == 1.0


def test_peak_memory_sees_a_buffer_that_is_gone_again() -> None:
    gc.collect()  # what earlier tests left would be given back in the middle, and hide as much of the buffer
    ctypes.CDLL(None).malloc_trim(0)
    with host.peak_memory() as peak:
        buffer = bytearray(64 << 20)
        deadline = time.monotonic() + 30
        while peak.extra_bytes < 60 << 20 and time.monotonic() < deadline:
            time.sleep(0.001)
        del buffer
    assert peak.extra_bytes > 60 << 20
