"""`flashckpt bench` as a user calls it: real runs of small sizes, comparison, bad arguments, what is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.s3 import s3_server

from flashckpt.bench import measure, probe
from flashckpt.bench.command import bench
from flashckpt.bench.compare import caveats, compare
from flashckpt.cli.main import main
from flashckpt.errors import ConfigError, FlashckptError, LayoutError, RootError
from flashckpt.plan.command import plan
from flashckpt.shm.job_directory import memory_root

OPTIONS = {"endpoint_url": "endpoint", "key": "key", "secret": "secret"}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(bench, list(arguments))


def result_of(path: Path, *arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json", str(path))
    assert result.exit_code == 0, (result.output, result.exception)
    return measure.read_json(path)


def left(*places: Path) -> list[str]:
    return [str(p) for place in places for p in place.rglob("*")]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run of `bench job` with peers, which several tests look at from their own side."""
    folder = tmp_path_factory.mktemp("job")
    command = [
        sys.executable,
        "-m",
        "flashckpt.cli.main",
        "bench",
        "job",
        str(folder / "storage"),
        "--layout",
        "llama3-70b",
    ]
    command += ["--scale", "1/16384", "--ranks", "3", "--rounds", "2", "--peers", "--json", str(folder / "job.json")]
    done = subprocess.run(
        [*command, "--plot", str(folder / "job.png")],
        env={**os.environ, "FLASHCKPT_SHM_DIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "job.png").read_bytes().startswith(b"\x89PNG")
    names = sorted(p.name for p in folder.rglob("*") if p.is_file())
    assert names == ["job.json", "job.png"]
    assert not (folder / "storage").exists()
    return {**measure.read_json(folder / "job.json"), "output": done.stdout, "path": str(folder / "job.json")}


def test_job_measures_every_phase_on_every_rank_and_verifies_the_bytes(job: dict[str, Any]) -> None:
    results = job["results"]
    assert results["verified"] is True
    assert results["ranks"] == 3
    assert results["stall_ms"]["n"] == 2 * 3
    for name in ("restorable_s", "restored_memory_s", "node_durable_s", "node_commit_s", "restored_storage_s"):
        assert results["summary_s"][name]["n"] == 2, name
        assert results["summary_s"][name]["median"] > 0
    for rates in results["rank_bytes_per_s"].values():
        assert len(rates) == 3
    assert results["parts_s"]["write"]
    assert results["summary_s"]["memory_wall_s"]["min"] >= results["summary_s"]["restored_memory_s"]["min"]
    assert results["cold"]["cached_share"] is not None
    assert results["x_memcpy"]["restorable_s"]["median"] > 0
    assert set(results["rates"]) >= {"copy_bytes_per_s", "write_bytes_per_s", "read_bytes_per_s", "persist_uplift"}


def test_peers_run_in_the_same_rounds(job: dict[str, Any]) -> None:
    peers = job["results"]["peers"]
    assert set(peers) == {"torch.save", "dcp.save", "dcp.async_save", "safetensors"}
    for one in peers.values():
        assert one["durable_s"]["n"] == 2
        assert one["blocked_s"]["median"] <= one["written_s"]["median"] <= one["durable_s"]["median"]
    assert peers["dcp.async_save"]["blocked_s"]["median"] < peers["dcp.async_save"]["written_s"]["median"]


def test_text_names_machine_load_and_every_phase(job: dict[str, Any]) -> None:
    for words in ("cores", "kernel", "load", "restored from storage, cold", "GiB/s", "stall per snapshot", "CPU s/GB"):
        assert words in job["output"], words
    assert ("UNDER LOAD" in job["output"]) == job["load"]["loaded"]


def test_plan_takes_the_measured_rates(job: dict[str, Any]) -> None:
    arguments = ["--gpus", "64", "--layout", "llama3-70b", "--from", job["path"], "--json", "-"]
    made = json.loads(CliRunner().invoke(plan, arguments).output)
    assert made["rates"]["write_bytes_per_s"] == job["results"]["rates"]["write_bytes_per_s"]
    assert made["rates"]["sources"]["copy_bytes_per_s"].startswith("measured by bench job")


def running_shm() -> tuple[subprocess.Popen[str], list[int]]:
    """Start a long `bench shm` of two ranks; return it with its host and rank pids once the slots exist."""
    command = [
        sys.executable,
        "-m",
        "flashckpt.cli.main",
        "bench",
        "shm",
        "--size",
        "4MiB",
        "--ranks",
        "2",
        "--rounds",
        "900",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while len(list(memory_root().glob(f".flashckpt-bench-*/flashckpt-{os.getuid()}/bench/r*.seg"))) < 2:
        assert time.monotonic() < deadline, "no segments appeared"
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    (host,) = children_of(process.pid)
    ranks = children_of(host)
    assert len(ranks) == 2
    return process, [host, *ranks]


def wait_until_dead(pids: list[int]) -> None:
    deadline = time.monotonic() + 60
    while any(_runs(pid) for pid in pids):
        assert time.monotonic() < deadline, "a process outlived its parent"
        time.sleep(0.05)


def test_benchmark_killed_in_the_middle_leaves_no_process_and_the_next_run_removes_the_rest(tmp_path: Path) -> None:
    process, pids = running_shm()
    process.kill()
    process.communicate()
    wait_until_dead(pids)
    assert left(memory_root())
    result_of(tmp_path / "x.json", "store", str(tmp_path / "s"), "--size", "1MiB", "--rounds", "1", "--small", "1")
    assert left(memory_root())  # a store run needs no memory tier and leaves it alone
    from flashckpt.bench import scratch

    with scratch.memory(1, what="test"):
        pass
    assert not left(memory_root())


def test_rank_killed_in_the_middle_is_one_clear_error_and_leaves_nothing() -> None:
    process, pids = running_shm()
    os.kill(pids[-1], signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "process of the benchmark died" in said
    wait_until_dead(pids)
    assert not left(memory_root())


def test_ctrl_c_in_the_middle_leaves_nothing() -> None:
    process, pids = running_shm()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    wait_until_dead(pids)
    assert not left(memory_root())


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


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


@pytest.mark.usefixtures("default_client")
def test_store_on_s3_says_what_the_server_ignores_and_leaves_the_bucket_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with s3_server() as server:
        url = f"s3://{server.bucket}/bench"
        given = [f"{key}={getattr(server, name)}" for key, name in OPTIONS.items()]
        options = [text for pair in given for text in ("-o", pair)]
        made = result_of(
            tmp_path / "x.json", "store", url, *options, "--size", "17MiB", "--rounds", "1", "--small", "2"
        )
        able = made["results"]["capabilities"]
        assert able["conditional_put"] is True
        assert able["ranges"] is True
        assert able["o_direct"] is None
        assert isinstance(able["conditional_multipart"], bool)
        assert able["server_checksums"] is False  # moto and radosgw 16 alike
        assert made["results"]["cold"]["cached_share"] is None
        assert server.secret not in json.dumps(made)
        client = server.client()
        assert client.list_objects_v2(Bucket=server.bucket).get("KeyCount") == 0
        assert not client.list_multipart_uploads(Bucket=server.bucket).get("Uploads")


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
