"""A benchmark leaves nothing behind, whatever ends it, and refuses what is not its own before it writes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.s3 import s3_server

from flashckpt.bench import scratch
from flashckpt.errors import ConfigError, JobInUseError, RootError, SharedMemoryError
from flashckpt.shm.job_directory import memory_root

HOLD = """
import faulthandler, sys, time
from flashckpt.bench import scratch
faulthandler.dump_traceback_later(45)  # says where a run that was stopped hangs
with scratch.memory(1 << 20, what="test") as memory, scratch.storage(sys.argv[1], 1 << 20, options={}, keep=False) as place:
    (memory / "slot").write_bytes(b"x" * 1000)
    place.open().put("data", b"x" * 1000)
    print("holding", flush=True)
    time.sleep(120)
"""


def holding(url: Path) -> subprocess.Popen[str]:
    """Start a run that has written something and waits."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(url)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "holding\n"
    return process


def hold(url: Path, *, keep: bool = False) -> str:
    with scratch.storage(str(url), 1 << 20, options={}, keep=keep) as place:
        place.open().put("data", b"x")
        return place.token


def everything(path: Path) -> list[str]:
    return sorted(str(p.relative_to(path)) for p in path.rglob("*"))


def test_clean_end_leaves_nothing_not_even_the_directories_it_made(tmp_path: Path) -> None:
    hold(tmp_path / "a" / "b")
    assert everything(tmp_path) == []
    (tmp_path / "mine").mkdir()
    hold(tmp_path / "mine")
    assert everything(tmp_path) == ["mine"]


def fail_inside(url: Path) -> None:
    with scratch.storage(str(url), 1, options={}, keep=False) as place:
        place.open().put("data", b"x")
        raise ValueError("inside")


def test_error_inside_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="inside"):
        fail_inside(tmp_path / "a")
    assert everything(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_during_a_run_leaves_nothing(tmp_path: Path, number: int) -> None:
    process = holding(tmp_path / "a")
    for _ in range(20):  # one stop often comes several times: process groups, timeout(1)
        process.send_signal(number)
    process.communicate(timeout=60)
    assert everything(tmp_path) == []
    assert everything(memory_root()) == []


def test_stop_that_comes_again_later_ends_a_clean_up_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch._Stops, "PATIENCE_S", 0.0)
    monkeypatch.setattr(scratch, "_remove", lambda *_: os.kill(os.getpid(), signal.SIGINT))

    def stopped() -> None:
        with scratch.storage(str(tmp_path / "a"), 1, options={}, keep=False):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert everything(tmp_path)
    monkeypatch.undo()


def test_killed_run_is_removed_by_the_next_one_in_memory_and_on_storage(tmp_path: Path) -> None:
    process = holding(tmp_path / "a")
    process.kill()
    process.communicate(timeout=60)
    left = everything(tmp_path)
    assert any(name.endswith("/data") for name in left)
    assert any(name.endswith("/slot") for name in everything(memory_root()))

    with scratch.memory(1, what="test"), scratch.storage(str(tmp_path / "a"), 1, options={}, keep=False) as place:
        assert len(place.swept) == 1
    assert everything(memory_root()) == []
    assert everything(tmp_path) == ["a"]  # the dead run made it; the next one found it


def test_clean_up_killed_half_way_is_taken_up_again(tmp_path: Path) -> None:
    """The marker goes last, and a folder whose marker is gone already is still recognised by its name."""
    process = holding(tmp_path / "a")
    process.kill()
    process.communicate(timeout=60)
    (folder,) = (tmp_path / "a").iterdir()
    (folder / "data").unlink()
    hold(tmp_path / "a")
    assert everything(tmp_path / "a") == []
    process = holding(tmp_path / "a")
    process.kill()
    process.communicate(timeout=60)
    (folder,) = (tmp_path / "a").iterdir()
    (folder / scratch.MARKER).unlink()
    hold(tmp_path / "a")
    assert everything(tmp_path / "a") == []


def test_second_run_on_the_same_place_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    process = holding(tmp_path / "a")
    try:
        before = everything(tmp_path)
        with pytest.raises(JobInUseError, match="another benchmark") as refusal:
            hold(tmp_path / "a")
        assert str(process.pid) in refusal.value.found
        assert everything(tmp_path) == before
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


@pytest.mark.parametrize("name", ["run/step-000000120.g3/MANIFEST", "notes.txt", "flashckpt"])
def test_place_that_holds_something_of_the_users_is_refused_and_left_as_it_was(tmp_path: Path, name: str) -> None:
    mine = tmp_path / name
    mine.parent.mkdir(parents=True, exist_ok=True)
    mine.write_text("precious")
    before = everything(tmp_path)
    with pytest.raises(RootError, match="not empty"):
        hold(tmp_path)
    assert everything(tmp_path) == before
    assert mine.read_text() == "precious"


def test_users_file_beside_the_rest_of_a_killed_run_keeps_both(tmp_path: Path) -> None:
    process = holding(tmp_path)
    process.kill()
    process.communicate(timeout=60)
    (tmp_path / "mine").write_text("precious")
    before = everything(tmp_path)
    with pytest.raises(RootError, match="not empty"):
        hold(tmp_path)
    assert everything(tmp_path) == before


def test_kept_run_stays_and_is_named_to_the_next_one(tmp_path: Path) -> None:
    token = hold(tmp_path, keep=True)
    before = everything(tmp_path)
    assert before
    with pytest.raises(RootError, match="kept") as refusal:
        hold(tmp_path)
    assert token in refusal.value.found
    assert everything(tmp_path) == before


def test_too_little_room_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with (
        pytest.raises(RootError, match="too little space") as refusal,
        scratch.storage(str(tmp_path / "a"), 1 << 60, options={}, keep=False),
    ):
        pass
    assert "free" in refusal.value.found
    with pytest.raises(SharedMemoryError), scratch.memory(1 << 60, what="test"):
        pass
    assert everything(tmp_path) == []
    assert everything(memory_root()) == []


def test_directory_without_rights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RootError):
        hold(tmp_path / "file" / "below")
    if os.getuid():
        tmp_path.chmod(0o500)
        with pytest.raises(RootError):
            hold(tmp_path / "a")
        tmp_path.chmod(0o700)


def test_storage_of_one_process_is_refused_for_several() -> None:
    with (
        pytest.raises(ConfigError, match="is process-local"),
        scratch.storage("memory://x", 1, options={}, keep=False, processes=2),
    ):
        pass


@pytest.mark.usefixtures("default_client")
def test_clean_up_on_s3_ends_its_own_uploads_and_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload that somebody else began beside the benchmark, not visible as an object yet, goes on."""
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with s3_server() as server:
        client = server.client()
        options = {"endpoint_url": server.endpoint, "key": server.key, "secret": server.secret}
        with scratch.storage(f"s3://{server.bucket}/run", 1, options=options, keep=False) as place:
            place.open().put("data", b"x")
            prefix = place.url.removeprefix(f"s3://{server.bucket}/")
            client.create_multipart_upload(Bucket=server.bucket, Key=f"{prefix}/left")
            client.create_multipart_upload(Bucket=server.bucket, Key="run/theirs")
        uploads = client.list_multipart_uploads(Bucket=server.bucket)["Uploads"]
        assert [upload["Key"] for upload in uploads] == ["run/theirs"]
        assert client.list_objects_v2(Bucket=server.bucket)["KeyCount"] == 0


def test_pid_used_again_is_not_taken_for_the_owner() -> None:
    marker = scratch.owner()
    assert scratch.is_alive(marker)
    assert not scratch.is_alive({**marker, "start": marker["start"] - 1})
    assert not scratch.is_alive({})


@pytest.mark.parametrize(("age_s", "alive"), [(60.0, True), (2 * scratch.FORGOTTEN_S, False)])
def test_marker_of_another_machine_is_believed_for_a_day(age_s: float, alive: bool) -> None:
    assert scratch.is_alive({"boot": "another", "pid": 1, "start": 1, "time": time.time() - age_s}) is alive


def test_jobs_in_memory_are_never_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    job = memory_root() / "job-1"
    job.parent.mkdir(mode=0o700)
    job.mkdir(mode=0o700)
    (job / "r00000-0.seg").write_text(json.dumps({}))
    with scratch.memory(1, what="test") as path:
        assert path.name.startswith(".")
    assert (job / "r00000-0.seg").exists()
