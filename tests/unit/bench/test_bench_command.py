"""`flashckpt bench` as a user calls it: real runs of small sizes, comparison, bad arguments, what is left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.bench_runs import left, result_of, run

from flashckpt.bench import measure, probe
from flashckpt.bench.table import caveats, compare
from flashckpt.cli.main import main
from flashckpt.errors import ConfigError, FlashckptError, LayoutError, RootError
from flashckpt.shm.job_directory import memory_root


def test_store_measures_raw_ours_floor_and_small_and_leaves_nothing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "x.png"
    arguments = ["store", str(tmp_path / "s"), "--size", "5MB", "--rounds", "3", "--small", "4", "--plot", str(picture)]
    made = result_of(tmp_path / "x.json", *arguments)
    results = made["results"]
    for name in ("floor write", "raw write", "flashckpt durable", "floor read", "raw read", "flashckpt restore"):
        assert results["bytes_per_s"][name]["n"] == 3, name
    assert results["summary_s"]["publish_s"]["n"] == 12
    assert results["capabilities"]["conditional_put"] is True
    assert results["capabilities"]["ranges"] is True
    assert made["host"]["file_systems"][0]["type"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.json", "x.png"]


def test_store_on_tmpfs_says_that_nothing_there_is_durable_or_cold(tmp_path: Path, shm_dir: Path) -> None:
    made = result_of(
        tmp_path / "x.json", "store", str(shm_dir / "s"), "--size", "2MiB", "--rounds", "1", "--small", "1"
    )
    if made["host"]["file_systems"][0]["type"] == "tmpfs":
        assert "no-op" in made["results"]["capabilities"]["fsync"]
        assert made["results"]["cold"]["cached_share"] == 1.0


def test_store_that_is_kept_stays(tmp_path: Path) -> None:
    assert run("store", str(tmp_path / "s"), "--size", "1MiB", "--rounds", "2", "--small", "1", "--keep").exit_code == 0
    names = [p.name for p in (tmp_path / "s").rglob("*")]
    assert "owner.json" in names
    assert names.count("MANIFEST") == 1


@pytest.mark.parametrize(
    ("publish_s", "write_s", "words"), [(1e-5, 1.0, "30 us"), (1e-3, 1e-4, "as fast as"), (1e-3, 1.0, "no impossible")]
)
def test_rates_that_no_device_has_are_flagged(tmp_path: Path, publish_s: float, write_s: float, words: str) -> None:
    seconds = {"publish_s": [publish_s], "raw_write_s": [write_s]}
    verdict = probe.fsync_verdict(tmp_path, seconds, 64 << 20)
    assert words in verdict or "tmpfs" in verdict


def test_result_can_go_to_standard_output(tmp_path: Path) -> None:
    output = run("store", str(tmp_path / "s"), "--size", "1MiB", "--rounds", "1", "--small", "1", "--json", "-").output
    assert json.loads(output)["kind"] == "store"


def test_sizes_beside_the_published_ones_without_any_trademark() -> None:
    output = run("job", "--sizes").output
    for words in ("105 GB", "912 GB", "5.29 TB", "18 TB", "GiB"):
        assert words in output
    assert "mlperf" not in output.lower()


def document(**figures: list[float]) -> dict[str, Any]:
    results = {"summary_s": {name: measure.summarise(values) for name, values in figures.items()}}
    return measure.document("store", {}, results, load=measure.LoadWatch(cores=2, load_before=0))


def test_comparison_tells_differences_from_noise() -> None:
    a = document(same=[1.0, 1.1, 0.9, 1.0], slower=[1.0, 1.01, 0.99, 1.0], short=[1.0], gone=[1.0])
    b = document(same=[1.05, 1.2, 0.95, 1.1], slower=[2.0, 2.02, 1.98, 2.0], short=[9.0])
    rows = {row.name.rpartition(".")[2]: row for row in compare(a, b)}
    assert set(rows) == {"same", "slower", "short"}
    assert rows["slower"].ratio == pytest.approx(2)
    assert rows["slower"].verdict == "beyond the spread"
    assert rows["same"].verdict == "within the spread"
    assert rows["short"].verdict == "too few rounds"


def test_figures_inside_lists_are_compared() -> None:
    figures = measure.plain(measure.summarise([1.0, 1.0, 1.0]))
    a = {"kind": "stall", "results": {"1 GB": {"groups": [{"lost_s": figures}, {"lost_s": figures}]}}}
    assert [row.name for row in compare(a, a)] == ["1 GB.groups.1.lost_s", "1 GB.groups.2.lost_s"]


def test_comparison_of_other_machines_load_or_arguments_is_warned_about() -> None:
    a, b = document(x=[1.0]), document(x=[1.0])
    assert not [line for line in caveats(a, b) if "cpu" in line]
    b["host"]["cpu"] = "another"
    b["arguments"]["size"] = 5
    b["load"] = {"loaded": True, "reasons": ["load average 9"]}
    said = " ".join(caveats(a, b))
    assert "cpu" in said
    assert "size differs" in said
    assert "load average 9" in said


def test_comparison_command(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        measure.write_json(tmp_path / name, document(x=[1.0, 1.0, 1.0]))
    output = run("compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")).output
    assert "1.000" in output
    assert "within the spread" in output
    measure.write_json(tmp_path / "c.json", {**document(x=[1.0]), "kind": "job"})
    assert "cannot be compared" in str(run("compare", str(tmp_path / "a.json"), str(tmp_path / "c.json")).exception)


@pytest.mark.parametrize(
    "arguments",
    [
        ["store", "{}", "--size", "0MB"],
        ["store", "{}", "--size", "-1MB"],
        ["store", "{}", "--size", "1kB"],
        ["store", "{}", "--size", "100"],
        ["store", "{}", "--size", "9999999TB"],
        ["store", "{}", "--size", "100TiB"],
        ["store", "{}", "--rounds", "0"],
        ["store", "{}", "--rounds", "-3"],
        ["store", "{}", "--rounds", "1000000"],
        ["store", "{}", "--small", "0"],
        ["store", "{}", "--compression", "zip"],
        ["store", "{}", "-o", "novalue"],
        ["store", "{}", "-o", "key=value"],
        ["store", "{}", "--plot", "/nonexistent/x.png"],
        ["store", "{}", "--json", "/nonexistent/x.json"],
        ["store", "https://example.invalid/x"],
        ["store", "/proc/nothing/here", "--size", "1MiB", "--rounds", "1"],
        ["shm", "--size", "1TB"],
        ["shm", "--ranks", "0"],
        ["shm", "--slots", "1"],
        ["shm", "--slots", "9"],
        ["job"],
        ["job", "{}", "--scale", "0"],
        ["job", "{}", "--scale", "2"],
        ["job", "{}", "--scale", "1/0"],
        ["job", "{}", "--ranks", "0"],
        ["job", "{}", "--ranks", "9"],
        ["job", "{}", "--tp", "0"],
        ["job", "{}", "--pp", "1000"],
        ["job", "{}", "--scale", "1"],  # 112 GB of live state
        ["job", "memory://x", "--scale", "1/16384"],
        ["job", "s3://bucket/x", "--peers", "--scale", "1/16384"],
    ],
    ids=" ".join,
)
def test_absurd_argument_is_one_clear_error_before_anything_is_written(tmp_path: Path, arguments: list[str]) -> None:
    place = tmp_path / "place"
    result = run(*[argument.format(place) for argument in arguments])
    assert isinstance(result.exception, (ConfigError, LayoutError, RootError)), (result.output, result.exception)
    error = result.exception
    assert isinstance(error, FlashckptError)
    assert error.found or error.expected or error.remedy
    assert not left(tmp_path)
    assert not left(memory_root())


def test_busy_machine_is_refused_where_quiet_is_required(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (1000.0, 1000.0, 1000.0))
    result = run("store", str(tmp_path / "s"), "--size", "1MiB", "--require-quiet")
    assert "too busy" in str(result.exception)
    assert not left(tmp_path)
    made = result_of(tmp_path / "x.json", "store", str(tmp_path / "s"), "--size", "1MiB", "--rounds", "1")
    assert made["load"]["loaded"]


def test_commands_and_persister_start_without_torch() -> None:
    modules = "flashckpt.bench.command, flashckpt.plan.command, flashckpt.bench.job, flashckpt.bench.store, flashckpt.bench.persister"
    code = f"import sys, {modules}, flashckpt.plan.report, flashckpt.bench.table; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_error_has_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "store", str(tmp_path), "--size", "1MiB"])
    assert stopped.value.code == RootError.exit_code
    assert "not empty" in capsys.readouterr().err


def test_a_store_ends_in_the_line_of_a_program() -> None:
    from flashckpt.bench.table import _use

    asked = {"url": "s3://b/scratch", "size": 10**9, "compression": "zstd"}
    for seconds, time in ((0.2, "10s"), (2.31, "24s"), (60.0, "10min")):
        made = {"kind": "store", "arguments": asked, "results": {"summary_s": {"durable_s": {"median": seconds}}}}
        (line,) = _use(made)
        assert line.endswith(f'Checkpointer("s3://b/scratch", persist_every="{time}", compression="zstd")')
    assert not _use({**made, "kind": "shm"})
