"""Folders of files that another library writes: committed by one write, found damaged or whole, killed at each point."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.s3_stub import s3_stub

from flashckpt import faults
from flashckpt.errors import DamagedError
from flashckpt.integrations import committed_files
from flashckpt.integrations.committed_files import CommittedFiles
from flashckpt.storage import store as storage
from flashckpt.storage.factory import open_store

PART, BLOCK = 1 << 10, 1 << 8
"""Small ones, so that few bytes make many of them."""


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committed_files, "PART_BYTES", PART)
    monkeypatch.setattr(committed_files, "BLOCK_BYTES", BLOCK)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.fixture(params=["directory", "s3"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], CommittedFiles]]:
    """Give what opens the root anew, as another process would."""
    if request.param == "directory":
        yield lambda: CommittedFiles(open_store(tmp_path / "root"))
        return
    with s3_stub() as stub:
        yield lambda: CommittedFiles(open_store("s3://bucket/run", **stub.options(backend="s3fs")))


def content(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def put(files: CommittedFiles, path: str, data: bytes, *, by: int = 700) -> None:
    with files.write(path) as stream:
        for start in range(0, len(data), by):
            stream.write(data[start : start + by])


def save(files: CommittedFiles, step: int, *, seed: int = 0, name: str = "model_0.pt") -> None:
    put(files, f"tmp_step_{step}/{name}", content(3000, seed))
    put(files, f"tmp_step_{step}/deep/state.json", b"{}")
    files.commit(f"tmp_step_{step}", f"step_{step}")


def test_a_file_written_again_under_the_temporary_name_costs_the_committed_folder_nothing(
    opened: Callable[[], CommittedFiles],
) -> None:
    """Who committed it died before that name was gone; what is written there next replaces records, not its parts."""
    killed(lambda: save(opened(), 5), "folder.after-commit")
    put(opened(), "tmp_step_5/model_0.pt", content(3000, 1))
    opened().delete("tmp_step_5/deep/state.json")
    files = opened()
    assert files.read("step_5/model_0.pt").readall() == content(3000, 0)
    assert files.read("step_5/deep/state.json").readall() == b"{}"


def data_keys(files: CommittedFiles) -> list[str]:
    return [info.key for info in files.store.list("data/")]


def killed(work: Callable[[], object], point: str) -> None:
    """Do it in a child that dies at a crash point."""
    if (pid := os.fork()) == 0:
        try:
            faults.arm(point)
            work()
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL


def test_a_committed_folder_is_read_at_any_position_and_removed_whole(opened: Callable[[], CommittedFiles]) -> None:
    files, data = opened(), content(3000)
    save(files, 1)
    put(files, "loose/empty", b"")
    files = opened()
    assert files.names("") == ["loose", "step_1"]
    assert files.names("step_1") == ["deep", "model_0.pt"]
    assert files.names("step_1/deep") == ["state.json"]
    assert not files.exists("tmp_step_1")
    assert files.exists("step_1/deep/state.json")
    assert files.read("loose/empty").readall() == b""
    stream = files.read("step_1/model_0.pt")
    assert (stream.nbytes, stream.readall()) == (3000, data)
    for start, nbytes in itertools.product(
        (0, 1, BLOCK, PART - 1, PART, 2999, 3000, 4000), (0, 1, BLOCK, 2 * PART, 3001)
    ):
        assert stream.seek(start) == start
        assert stream.read(nbytes) == data[start : start + min(nbytes, max(0, PART - start % PART))]
    assert stream.seek(-2, os.SEEK_END) == 2998
    assert stream.readall() == data[-2:]
    files.remove("step_1")
    assert files.names("") == ["loose"]
    assert data_keys(files) == []
    with pytest.raises(FileNotFoundError):
        files.read("step_1/model_0.pt")
    with pytest.raises(FileNotFoundError):
        files.remove("step_1")


def test_what_is_committed_does_not_change_and_nothing_takes_its_name(opened: Callable[[], CommittedFiles]) -> None:
    files = opened()
    save(files, 1)
    with pytest.raises(PermissionError):
        put(files, "step_1/model_0.pt", b"other")
    with pytest.raises(PermissionError):
        files.delete("step_1/model_0.pt")
    with pytest.raises(FileExistsError):
        save(files, 1, seed=1)
    with pytest.raises(FileNotFoundError):
        files.commit("tmp_step_2", "step_2")
    assert opened().read("step_1/model_0.pt").readall() == content(3000)
    files.remove("tmp_step_1")  # of the refused save: it took nothing of the other
    assert opened().read("step_1/model_0.pt").readall() == content(3000)


def test_of_two_commits_at_once_one_is_there_and_a_folder_with_other_files_is_occupied(
    opened: Callable[[], CommittedFiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    late = opened()
    put(late, "late/model_0.pt", content(2000, 1))
    put(late, "loose/other.pt", b"x")
    with pytest.raises(FileExistsError):
        late.commit("late", "loose")
    monkeypatch.setattr(late, "exists", lambda path: False)  # it looked before the other one committed
    save(opened(), 1)
    with pytest.raises(FileExistsError):
        late.commit("late", "step_1")
    assert opened().read("step_1/model_0.pt").readall() == content(3000)


def test_one_flipped_bit_is_found_wherever_it_is(tmp_path: Path) -> None:
    files = CommittedFiles(open_store(tmp_path / "root"))
    save(files, 1)
    stored = [tmp_path / "root" / info.key for info in files.store.list() if "/of." not in info.key]
    assert len(stored) == 5  # three parts, the other file, the manifest
    for file in stored:
        raw = bytearray(file.read_bytes())
        raw[len(raw) // 2] ^= 1
        file.write_bytes(raw)
        with pytest.raises(DamagedError):
            [CommittedFiles(files.store).read(f"step_1/{name}").readall() for name in ("model_0.pt", "deep/state.json")]
        raw[len(raw) // 2] ^= 1
        file.write_bytes(raw)


def test_a_stream_that_is_left_by_an_error_or_not_at_all_leaves_no_file(opened: Callable[[], CommittedFiles]) -> None:
    files = opened()
    with contextlib.suppress(ZeroDivisionError), files.write("tmp_step_1/model_0.pt") as stream:
        stream.write(content(3000))
        raise ZeroDivisionError
    files.write("tmp_step_1/other.pt").write(b"x")
    assert not files.exists("tmp_step_1")


def test_loose_files_are_replaced_and_renamed_within_their_folder(opened: Callable[[], CommittedFiles]) -> None:
    files = opened()
    for seed in range(2):
        put(files, "hf/.tmp", content(2000, seed))
        files.rename_file("hf/.tmp", "hf/model.safetensors")
    assert files.names("hf") == ["model.safetensors"]
    assert files.read("hf/model.safetensors").readall() == content(2000, 1)
    assert len(data_keys(files)) == 2
    files.rename_file("hf/model.safetensors", "hf/model.safetensors")
    with pytest.raises(OSError, match="within its folder"):
        files.rename_file("hf/model.safetensors", "other/model.safetensors")
    files.delete("hf/model.safetensors")
    assert data_keys(files) == []


POINTS = {"folder.after-part:2": False, "folder.before-commit": False, "folder.after-commit": True}


@pytest.mark.parametrize("point", POINTS)
def test_a_save_that_is_killed_is_there_whole_or_not_at_all_and_the_next_one_leaves_nothing_of_it(
    opened: Callable[[], CommittedFiles], point: str
) -> None:
    save(opened(), 1)
    kept = len(data_keys(opened()))
    killed(lambda: save(opened(), 2, seed=2), point)
    files = opened()
    assert files.read("step_1/model_0.pt").readall() == content(3000)
    assert files.exists("step_2") == POINTS[point]
    if not POINTS[point]:
        save(files, 2, seed=3)
    files = opened()
    assert files.read("step_2/model_0.pt").readall() == content(3000, 2 if POINTS[point] else 3)
    files.remove("step_2")
    assert len(data_keys(opened())) == kept
    assert opened().names("") == ["step_1"]


def test_a_removal_that_is_killed_takes_the_folder_and_the_next_one_its_data(
    opened: Callable[[], CommittedFiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        save(opened(), step)
    alone = len(data_keys(opened())) // 3
    killed(lambda: opened().remove("step_1"), "folder.during-removal")
    assert opened().names("") == ["step_2", "step_3"]
    assert len(data_keys(opened())) == 3 * alone
    opened().remove("step_2")  # what is younger than an hour may be being written
    assert len(data_keys(opened())) == 2 * alone
    monkeypatch.setattr(committed_files, "SWEEP_AGE_S", -storage.SWEEP_AGE_S)
    save(opened(), 4)
    opened().remove("step_4")
    assert len(data_keys(opened())) == alone
    assert opened().read("step_3/model_0.pt").readall() == content(3000)


def test_files_of_ranks_that_are_no_more_are_not_committed(
    opened: Callable[[], CommittedFiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks died in a save; one saves the step again."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in range(2):
        put(opened(), f"tmp_step_1/model_{rank}.pt", content(2000, rank))
    monkeypatch.setenv("WORLD_SIZE", "1")
    save(opened(), 1, seed=5)
    assert opened().names("step_1") == ["deep", "model_0.pt"]
    assert len(data_keys(opened())) == 6  # three parts, one, and whose they are
