"""The `flashckpt` command: what it prints, its JSON, its exit codes, and one clear message per bad root."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click.testing
import pytest
from support.daemons import two_checkpoints
from support.memory_tier import FakeJob
from support.paths import ROOT
from support.ranks import wait_for

from flashckpt.checkpoint import indexes
from flashckpt.checkpoint.catalog import list_checkpoints
from flashckpt.checkpoint.history import SessionRecord, write_session
from flashckpt.checkpoint.root_records import claim_generation
from flashckpt.cli import main as cli
from flashckpt.commands import ls as ls_command
from flashckpt.core.lineage import Generation
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.daemon.persister.service import Daemon
from flashckpt.daemon.persister.timeouts import DaemonTimeouts
from flashckpt.native import IMPLEMENTATIONS, implementation
from flashckpt.shm import inventory
from flashckpt.shm.block import huge_pages
from flashckpt.shm.control import Control
from flashckpt.shm.job_directory import DaemonStatus, memory_root
from flashckpt.storage.factory import open_store
from flashckpt.storage.posix import PosixStore

Captured = pytest.CaptureFixture[str]


def run(*arguments: str, capsys: Captured) -> tuple[int, str, str]:
    """Run the command in this process; return (exit code, stdout, stderr)."""
    with pytest.raises(SystemExit) as done:
        cli.main(list(arguments))
    out = capsys.readouterr()
    return int(done.value.code or 0), out.out, out.err


def run_json(*arguments: str, capsys: Captured) -> tuple[int, Any]:
    code, out, _ = run(*arguments, "--json", capsys=capsys)
    return code, json.loads(out)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[FakeJob]:
    """A job with steps 10 and 20 committed and 25 in memory."""
    fake = FakeJob(str(tmp_path / "root"), shapes={"model.layers.0.w": (600, 1000), "model.layers.0.b": (7,)})
    lock = fake.directory.hold_daemon()
    assert lock is not None
    daemon = Daemon(fake.directory, lock, DaemonTimeouts(linger_s=0.0))
    store = open_store(fake.root)
    for step in (10, 20):
        fake.step(step, persist=True)
        wait_for(lambda: daemon.turn() or any(i.step == step for i in list_checkpoints(store)), what="a commit")  # noqa: B023
    fake.step(25)
    daemon.turn()
    daemon.close()
    yield fake
    fake.die()


def test_ls_shows_storage_and_memory_newest_first(job: FakeJob, capsys: Captured) -> None:
    code, document = run_json("ls", job.root, capsys=capsys)
    assert code == 0
    rows = [(row["step"], row["tier"], row["state"]) for row in document["checkpoints"]]
    assert rows[0] == (25, "memory", "snapshot")
    assert [row for row in rows if row[1] == "storage"] == [(20, "storage", "committed"), (10, "storage", "committed")]
    code, out, _ = run("ls", job.root, capsys=capsys)
    assert code == 0
    assert "committed" in out
    assert out.splitlines()[0].split()[:4] == ["STEP", "GEN", "TIER", "STATE"]


def test_ls_while_a_job_ends_and_its_memory_goes(
    job: FakeJob, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def then_gone(*found: Any) -> Any:
        view = inventory.scan(*found)
        for one in view.slots:
            one.path.unlink(missing_ok=True)
        return view

    monkeypatch.setattr(ls_command, "scan", then_gone)
    code, document = run_json("ls", job.root, capsys=capsys)
    assert code == 0
    assert [row["step"] for row in document["checkpoints"] if row["tier"] == "storage"] == [20, 10]


def test_ls_marks_abandoned_unfinished_and_kept(job: FakeJob, capsys: Captured) -> None:
    store = open_store(job.root)
    assert claim_generation(store, Generation(number=2, token="x", parent=SnapshotId(1, 10)))
    store.put_object("step-000000030.g2/r00000.p0.fck", [memoryview(b"half")])
    assert run("keep", job.root, "10", capsys=capsys)[0] == 0
    rows = run_json("ls", job.root, capsys=capsys)[1]["checkpoints"]
    found = {(row["step"], row["state"], row["kept"]) for row in rows if row["tier"] == "storage"}
    assert found == {(10, "committed", True), (20, "abandoned", False), (30, "unfinished", False)}


def test_inspect_shows_tensors_layout_and_values(job: FakeJob, capsys: Captured) -> None:
    code, document = run_json("inspect", job.root, "--step", "10", capsys=capsys)
    assert code == 0
    assert (document["step"], document["generation"], document["world_size"]) == (10, 1, 2)
    weights = next(t for t in document["tensors"] if t["fqn"] == "model.layers.0.w")
    assert weights == {
        "fqn": "model.layers.0.w", "dtype": "float32", "shape": [600, 1000], "shards": 2, "nbytes": 2400000,
    }  # fmt: skip
    generators = {f"rng@rank{rank.rank}" for rank in job.ranks}
    assert document["values"].keys() == {"step"} | generators
    assert document["values"]["step"] == 10
    assert sum(document["writer_bytes"].values()) == document["nbytes"]
    code, out, _ = run("inspect", job.root, "--tensors", capsys=capsys)
    assert "w  float32 600x1000  2.4 MB in 2 shards" in out
    assert "step 20, generation 1, a fresh start" in out


def test_inspect_shows_a_summary_that_folds_equal_layers(capsys: Captured, tmp_path: Path) -> None:
    shapes: dict[str, tuple[int, ...]] = {f"model.layers.{layer}.w": (4, 5) for layer in range(40)} | {
        f"model.h{at}.b": (2,) for at in range(20)
    }
    with two_checkpoints(tmp_path / "root", shapes) as root:
        _, out, _ = run("inspect", root, capsys=capsys)
    lines = out.splitlines()
    assert "step 20, generation 1" in lines[1]
    assert ["model.layers.#.w", "40", "float32", "4x5", "3.2", "kB"] in [line.split() for line in lines]
    assert "... and 9 more kinds (--tensors lists all)" in lines
    assert any(line.startswith("rng@rank0 = ") and line.endswith(" and 1 more rank") for line in lines)
    assert len(lines) < 30
    assert max(len(line) for line in lines) <= 100


def test_verify_intact_then_a_flipped_bit_is_named(job: FakeJob, capsys: Captured) -> None:
    code, document = run_json("verify", job.root, "--all", capsys=capsys)
    assert code == 0
    assert [c["damaged"] for c in document["checkpoints"]] == [[], []]
    pack = Path(job.root) / "step-000000020.g1/r00000-00001.p0.fck"
    raw = bytearray(pack.read_bytes())
    raw[1_100_000] ^= 4
    pack.write_bytes(raw)
    code, document = run_json("verify", job.root, capsys=capsys)
    assert code == 32
    (damage,) = document["checkpoints"][0]["damaged"]
    assert damage["tensor"] == "model.layers.0.w"
    assert "object r00000-00001.p0.fck" in damage["problem"]
    assert "1048576 to 1200000" in damage["problem"]
    assert run("verify", job.root, "--step", "10", capsys=capsys)[0] == 0


def test_verify_reads_the_disk_and_not_the_page_cache(
    job: FakeJob, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: set[bool] = set()
    real = PosixStore.get_range

    def reading(store: PosixStore, *words: Any) -> None:
        read.add(store.past_cache)
        real(store, *words)

    monkeypatch.setattr(PosixStore, "get_range", reading)
    assert run("verify", job.root, capsys=capsys)[0] == 0
    assert read == {True}


def test_verify_missing_pack_is_named(job: FakeJob, capsys: Captured) -> None:
    (Path(job.root) / "step-000000020.g1/r00000-00001.p0.fck").unlink()
    code, out, _ = run("verify", job.root, capsys=capsys)
    assert code == 32
    assert "r00000-00001.p0.fck" in out


def test_diff_counts_differing_elements_and_equal_ones(job: FakeJob, capsys: Captured) -> None:
    code, document = run_json("diff", job.root, "10", "20", capsys=capsys)
    assert code == 1
    assert {t["fqn"]: (t["elements"], 0 < t["max_abs"] < 1) for t in document["tensors"]} == {
        "model.layers.0.w": (600000, True),
        "model.layers.0.b": (7, True),
    }
    assert document["values"].keys() == {"step", "rng@rank0", "rng@rank1"}
    assert document["values"]["step"] == [10, 20]
    code, document = run_json("diff", job.root, "20", "20", capsys=capsys)
    assert (code, document["equal"], document["tensors"]) == (0, 2, [])


def test_values_in_ranges_are_inspected_compared_and_verified(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexes, "RANGED_FROM", 1)
    with two_checkpoints(tmp_path / "root", {"model.w": (60, 10)}) as root:
        code, document = run_json("inspect", root, "--step", "10", capsys=capsys)
        assert code == 0
        assert document["values"].keys() == {"step", "rng@rank0", "rng@rank1"}
        assert document["writer_bytes"].keys() == {"r00000-00001"}
        _, document = run_json("diff", root, "10", "20", capsys=capsys)
        assert document["values"].keys() == {"step", "rng@rank0", "rng@rank1"}
        assert run("verify", root, "--all", capsys=capsys)[0] == 0
        (path,) = Path(root, "step-000000010.g1").glob("*.values.fck")
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)
        code, out, _ = run("verify", root, "--step", "10", capsys=capsys)
        assert code == 32
        assert "values of step-000000010.g1" in out


def test_status_shows_snapshot_commit_and_lag(job: FakeJob, capsys: Captured) -> None:
    code, document = run_json("status", capsys=capsys)
    (one,) = document["jobs"]
    assert code == 0
    assert (one["job"], one["alive"], one["snapshot"], one["committed"]) == ("fake", True, [1, 25], [1, 20])
    assert "fake" in run("status", capsys=capsys)[1]


def test_status_of_a_job_whose_persisting_fails_says_so_and_exits_with_40(job: FakeJob, capsys: Captured) -> None:
    job.directory.write_status(
        DaemonStatus(committed=SnapshotId(1, 20), failures=7, error="the disk is full\n  found: 0 B", lag=2)
    )
    code, document = run_json("status", "--job", "fake", capsys=capsys)
    assert (code, document["jobs"][0]["failures"], document["jobs"][0]["lag"]) == (40, 7, 2)
    code, out, _ = run("status", capsys=capsys)
    assert code == 40
    assert "the disk is full" in out
    found = run_json("status", "--job", "other", capsys=capsys)
    pages = huge_pages(memory_root().resolve())
    assert found == (0, {"jobs": [], "left_alone": [], "copied_by": implementation(), "huge_pages": pages})
    assert f"this installation copies memory by {implementation()}" in out


def test_status_says_by_what_the_ranks_of_a_job_copy(job: FakeJob, capsys: Captured) -> None:
    (one,) = run_json("status", capsys=capsys)[1]["jobs"]
    assert one["copied_by"] == []
    with contextlib.closing(Control.open(job.directory.control_path, rows=3)) as control:
        for row, number in zip(map(control.row, range(3)), (0, 1, len(IMPLEMENTATIONS)), strict=True):
            row.clear()
            row.pid, row.copied_by = (
                os.getpid(),
                number,
            )  # of a release before that said so, of this one, of a later one
    (one,) = run_json("status", capsys=capsys)[1]["jobs"]
    assert one["copied_by"] == ["python"]
    out = run("status", capsys=capsys)[1]
    assert ("its ranks copy by: python" in out) is (implementation() != "python")


def test_status_reads_goodput_from_the_ledger_and_skips_a_torn_line(job: FakeJob, capsys: Captured) -> None:
    from flashckpt.commands.status import goodput

    created_s = job.ranks[0].segment.created_ns / 1e9
    ledger = job.directory.path / "ledger.jsonl"
    ledger.write_text('{"total_s": 2.0, "seconds": {"recompute": 0.5}}\n{"total_s": -1.0}\n{"total_s": 2.5')
    found = goodput(job.directory, now_s=created_s + 100)
    assert (found["rank_failures"], found["lost_s"]) == (2, 2.5)
    assert abs(found["goodput"] - 0.975) < 0.01
    assert run_json("status", capsys=capsys)[1]["jobs"][0]["rank_failures"] == 2


def _dead_job(job: str, root: Path, *, steps: int) -> None:
    with contextlib.closing(contextlib.ExitStack()) as stack:
        dead = FakeJob(str(root), job=job)
        stack.callback(dead.die)
        for step in range(1, steps + 1):
            dead.step(step)


def test_status_shows_running_jobs_in_full_and_folds_dead_ones(job: FakeJob, capsys: Captured, tmp_path: Path) -> None:
    _dead_job("old", tmp_path / "old", steps=2)
    _dead_job("void", tmp_path / "void", steps=0)
    _, out, _ = run("status", capsys=capsys)
    assert "RUNNING   " + job.root + "  (job fake)" in out
    assert "in memory 25.g1   on storage 20.g1" in out
    assert "STOPPED   1 job can continue   1 holds nothing" in out
    assert f"newest: {tmp_path / 'old'}, step 2" in out
    assert "void" not in out
    assert max(len(line) for line in out.replace(str(tmp_path), "/checkpoints").splitlines()) <= 80
    _, out, _ = run("status", "--all", capsys=capsys)
    assert "dead, nothing to resume" in out
    assert len([line for line in out.splitlines() if "dead" in line]) == 2


def test_status_of_a_root_knows_its_sessions_after_memory_is_gone(job: FakeJob, capsys: Captured) -> None:
    store = open_store(job.root)
    first = SessionRecord(generation=1, token="aa", job="run", begun_s=100, updated_s=200, step=50, end="stopped")
    failure = {"cause": "killed by\x1b[31m SIGKILL", "rank": 3}
    second = replace(
        first, generation=2, token="bb", begun_s=210, updated_s=300, restored_step=40, step=90, end="ended"
    )
    shutil.rmtree(Path(job.root, "history"))
    for one in (first, replace(second, failure=failure)):
        write_session(store, one)
    job.die()
    job.directory.path.rename(job.directory.path.with_name(".gone"))
    code, out, _ = run("status", job.root, capsys=capsys)
    assert code == 0
    assert "2 sessions, 1 restart, 10 steps lost, 10 s down, goodput 85.0%" in out
    assert "generation 2 ended at step 90" in out
    assert r"1 x killed by\x1b[31m SIGKILL" in out
    document = run_json("status", job.root, capsys=capsys)[1]
    assert document["jobs"] == []
    assert document["history"]["steps_lost"] == 10
    assert [one["generation"] for one in document["history"]["records"]] == [1, 2]
    _, out, _ = run("inspect", job.root, capsys=capsys)
    assert "2 sessions, 1 restart, 10 steps lost" in out
    assert run_json("inspect", job.root, capsys=capsys)[1]["history"]["restarts"] == 1


def test_gc_shows_first_and_removes_only_dead_jobs(
    job: FakeJob, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHCKPT_KEEP_DEAD", "0.0001")
    assert run_json("gc", capsys=capsys)[1]["memory"] == []
    code, document = run_json("gc", "--job", "fake", "--apply", capsys=capsys)
    assert (code, document["error"]["type"]) == (15, "JobInUseError")
    job.die()
    assert [one["job"] for one in run_json("gc", capsys=capsys)[1]["memory"]] == ["fake"]
    assert job.directory.path.exists()
    assert run("gc", "--apply", capsys=capsys)[0] == 0
    assert not job.directory.path.exists()
    assert "nothing to remove" in run("gc", capsys=capsys)[1]


def test_gc_keeps_a_job_that_died_just_now(job: FakeJob, capsys: Captured) -> None:
    job.die()
    assert run_json("gc", "--apply", capsys=capsys)[1]["memory"] == []
    assert job.directory.path.exists()


def test_gc_prunes_a_root_on_request(job: FakeJob, capsys: Captured) -> None:
    document = run_json("gc", job.root, "--keep-last", "1", capsys=capsys)[1]
    assert document["storage"]["checkpoints"] == ["step-000000010.g1"]
    assert len(list_checkpoints(open_store(job.root))) == 2
    assert run("gc", job.root, "--keep-last", "1", "--apply", capsys=capsys)[0] == 0
    assert [i.step for i in list_checkpoints(open_store(job.root))] == [20]


def _newer_version(root: Path) -> None:
    for path in root.glob("step-*/MANIFEST"):
        raw = bytearray(path.read_bytes())
        raw[8] = 99
        path.write_bytes(raw)


def _damaged(root: Path) -> None:
    for path in root.glob("step-*/MANIFEST"):
        path.write_bytes(path.read_bytes()[:-3])


def _foreign(root: Path) -> None:
    (root / "holiday.jpg").write_bytes(b"x")


@pytest.mark.parametrize(
    ("make", "code", "words"),
    [
        (None, 13, "does not exist"),
        (lambda root: None, 30, "is empty"),
        (_foreign, 30, "is not a checkpoint root"),
    ],
)
def test_bad_root_gives_one_clear_message(
    tmp_path: Path, capsys: Captured, make: Callable[[Path], None] | None, code: int, words: str
) -> None:
    root = tmp_path / "bad"
    if make is not None:
        root.mkdir()
        make(root)
    for command in ("ls", "inspect", "verify"):
        found, out, err = run(command, str(root), capsys=capsys)
        assert (found, out) == (code, "")
        assert words in err.splitlines()[0]
        assert f"exit code {code}" in err
        assert run_json(command, str(root), capsys=capsys)[1]["error"]["exit_code"] == code


@pytest.mark.parametrize(("spoil", "words"), [(_newer_version, "format"), (_damaged, "damaged")])
def test_root_with_unusable_manifests_says_so_and_ls_still_lists_it(
    job: FakeJob, capsys: Captured, spoil: Callable[[Path], None], words: str
) -> None:
    spoil(Path(job.root))
    code, out, _ = run("ls", job.root, capsys=capsys)
    assert code == 0
    assert words in out
    code, out, err = run("inspect", job.root, capsys=capsys)
    assert code in (32, 36)
    assert words in err


def test_wrong_usage_and_help(capsys: Captured) -> None:
    assert run("frobnicate", capsys=capsys)[0] == 2
    assert run("ls", capsys=capsys)[0] == 2
    for name in cli.COMMANDS:
        command = cli.group.get_command(click.Context(cli.group), name)
        subcommands = list(command.commands) if isinstance(command, click.Group) else [""]
        if name == "train":  # its parts are the trainer's own programs
            continue
        for sub in subcommands:
            result = click.testing.CliRunner().invoke(cli.group, [name, *filter(None, [sub]), "--help"])
            assert result.exit_code == 0, result.output
            assert "--json" in result.output, (name, sub)
    code, out, _ = run("--help", capsys=capsys)
    assert code == 0
    assert all(name in out for name in cli.COMMANDS)


def test_command_starts_without_torch() -> None:
    script = (
        "import sys\nfrom flashckpt.cli import main as cli\n"
        "for name in cli.COMMANDS: assert cli.group.get_command(None, name)\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, env={**os.environ})
    assert done.returncode == 0


def test_inspect_coverage_names_what_each_rank_holds(job: FakeJob, capsys: Captured) -> None:
    rows = run_json("inspect", job.root, "--coverage", capsys=capsys)[1]["coverage"]
    found = {(row["step"], row["tier"], row["source"]): round(row["share"], 3) for row in rows}
    assert found[20, "storage", "checkpoint"] == 1.0
    assert found[25, "memory", "rank 0"] == 0.5
    assert found[25, "memory", "all ranks here"] == 1.0
    assert {(row["tier"], row["node"]) for row in rows} == {("storage", ""), ("memory", socket.gethostname())}
    assert "100.0%" in run("inspect", job.root, "--coverage", capsys=capsys)[1]


def test_inspect_plan_shows_reads_of_another_layout_without_reading(job: FakeJob, capsys: Captured) -> None:
    for pack in Path(job.root).glob("step-000000020*/*.fck"):
        pack.unlink()
    plan = run_json("inspect", job.root, "--step", "20", "--plan", "3x1x1", capsys=capsys)[1]["plan"]
    assert plan["world_size"] == len(plan["needed_bytes"]) == 3
    assert sum(plan["needed_bytes"]) == 600 * 1000 * 4 + 7 * 4
    assert all(read >= needed for read, needed in zip(plan["read_bytes"], plan["needed_bytes"], strict=True))
    assert sum(plan["read_bytes"]) <= 2400028 + 6 * (1 << 20)
    assert plan["memory_bytes"] == plan["needed_bytes"], "step 20 is still in memory, too"
    assert "restore as 2x2x1: 4 ranks" in run("inspect", job.root, "--plan", "2x2x1", capsys=capsys)[1]
    assert run("inspect", job.root, "--plan", "2x2", capsys=capsys)[0] == 10


def test_docs_name_every_command_and_every_exit_code() -> None:
    text = (ROOT / "docs/cli.md").read_text()
    for name in cli.COMMANDS:
        assert f"`flashckpt {name}" in text, name
    for code in re.findall(r"\b(\d+) [a-z]", cli.EPILOG):
        assert re.search(rf"^\| {code}\b", text, re.MULTILINE), code
    from flashckpt.daemon.persister import metrics

    for name in metrics.GAUGES:
        assert f"flashckpt_{name}`" in text, name
    for name in metrics.COUNTERS:
        assert f"flashckpt_{name}_total`" in text, name


def test_shell_completion_completes_commands(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_FLASHCKPT_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "flashckpt in")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert run(capsys=capsys)[1].split() == ["plain,inspect"]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("keep ROOT ", ["plain,20", "plain,10"]),
        ("verify ROOT --step 1", ["plain,10"]),
        ("keep nowhere ", []),
        ("persist fa", ["plain,fake"]),
        ("gc --job fa", ["plain,fake"]),
        ("top ./ro", ["file,./ro"]),
    ],
)
def test_shell_completion_knows_steps_of_a_root_jobs_and_paths(
    job: FakeJob, capsys: Captured, monkeypatch: pytest.MonkeyPatch, words: str, found: list[str]
) -> None:
    monkeypatch.setenv("_FLASHCKPT_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", f"flashckpt {words}".replace("ROOT", job.root))
    monkeypatch.setenv("COMP_CWORD", str(len(words.split(" "))))
    assert run(capsys=capsys)[1].split() == found


def test_a_checkpoint_of_a_newer_format_is_called_that_and_not_damaged(job: FakeJob, capsys: Captured) -> None:
    manifest = Path(job.root) / "step-000000020.g1/MANIFEST"
    raw = bytearray(manifest.read_bytes())
    raw[8] = 9
    manifest.write_bytes(raw)
    for command in (["inspect"], ["verify"], ["keep", "20"], ["export", "--to", "x.pt"]):
        name, *rest = command
        step = [] if name == "keep" else ["--step", "20"]
        code, document = run_json(name, job.root, *rest, *step, capsys=capsys)
        assert (code, document["error"]["type"]) == (36, "FormatVersionError"), command
    rows = run_json("ls", job.root, capsys=capsys)[1]["checkpoints"]
    assert [row["state"] for row in rows if row["tier"] == "storage"] == ["newer format", "committed"]


def test_verify_tells_of_a_newer_checkpoint_whose_manifest_is_damaged(job: FakeJob, capsys: Captured) -> None:
    manifest = Path(job.root) / "step-000000020.g1/MANIFEST"
    manifest.write_bytes(manifest.read_bytes()[:-3])
    code, document = run_json("verify", job.root, capsys=capsys)
    assert code == 32
    assert [(c["prefix"], bool(c["damaged"])) for c in document["checkpoints"]] == [
        ("step-000000020.g1", True),
        ("step-000000010.g1", False),
    ]


def test_a_damaged_generation_claim_is_named_with_what_to_do(job: FakeJob, capsys: Captured) -> None:
    (claim,) = (Path(job.root) / "generations").iterdir()
    claim.write_bytes(b"no claim")
    code, document = run_json("ls", job.root, capsys=capsys)
    assert code == 32
    assert claim.name in document["error"]["problem"]
    assert "backup" in document["error"]["remedy"]


def test_export_without_a_step_tells_of_a_newer_checkpoint_that_it_cannot_use(
    job: FakeJob, capsys: Captured, tmp_path: Path
) -> None:
    (Path(job.root) / "step-000000020.g1/MANIFEST").write_bytes(b"")
    code, out, err = run("export", job.root, "--to", str(tmp_path / "w.safetensors"), capsys=capsys)
    assert (code, "10.g1" in out) == (0, True)
    assert "a newer checkpoint cannot be used and was passed over: step-000000020.g1" in err


def test_wrong_usage_is_json_where_that_was_asked_for_and_names_the_nearest_command(
    capsys: Captured, tmp_path: Path
) -> None:
    code, document = run_json("ls", capsys=capsys)
    assert (code, document["error"]["problem"]) == (2, "Missing argument 'ROOT'.")
    code, _, err = run("inspct", str(tmp_path), capsys=capsys)
    assert (code, "Did you mean 'inspect'?" in err) == (2, True)
    (tmp_path / "file").touch()
    assert "is a file" in run("ls", str(tmp_path / "file"), capsys=capsys)[2]
