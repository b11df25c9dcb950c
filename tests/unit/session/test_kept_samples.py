"""Samples of loaders in shared memory: what a restart takes from there, and what it prepares as usual."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.engine import agent_dir
from support.loader_loop import program
from support.memory import killed_at
from torch import Tensor

from flashckpt.kept_samples import ring as kept_samples
from flashckpt.kept_samples.ring import KeptSamples
from flashckpt.kept_samples.sample_bytes import sample_bytes, sample_of
from flashckpt.sampler import SeededSamples

END_OF_EPOCH = 6  # of 22 samples in batches of 4
LATER = 1 << 62
"""When a process of a test begins: behind every file that is there."""


@pytest.fixture(autouse=True)
def all_are_worth_it(monkeypatch: pytest.MonkeyPatch, shm_dir: Path) -> None:
    monkeypatch.setattr(kept_samples, "_WORTH_S", -1.0)
    monkeypatch.setenv("FLASHCKPT_AGENT_DIR", "")  # restored after the test
    agent_dir()


# -- bytes of a sample


def plain(value: Any) -> Any:
    """Return what makes two samples equal in every bit."""
    if isinstance(value, Tensor):
        return (
            "tensor",
            value.dtype,
            value.shape,
            value.stride(),
            value.contiguous().view(-1).view(torch.uint8).tolist(),
        )
    if isinstance(value, np.ndarray):
        return "array", value.dtype.str, value.shape, value.strides, value.tobytes()
    if isinstance(value, np.generic):
        return "scalar", value.dtype.str, value.tobytes()
    if isinstance(value, dict):
        return "dict", [(plain(key), plain(one)) for key, one in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [plain(one) for one in value]
    return type(value), value.hex() if isinstance(value, float) else value


EXACT = [
    torch.tensor([float("nan"), -0.0, 1e-45]),
    torch.arange(6, dtype=torch.bfloat16).view(2, 3).t(),
    torch.arange(12).view(3, 4)[:, 1:3],
    torch.tensor(5),
    torch.empty(0, 3),
    torch.tensor([True, False]),
    torch.tensor([1 + 2j]),
    np.arange(6, dtype=">i2").reshape(2, 3),
    np.asfortranarray(np.ones((2, 3), np.float16)),
    np.float32(0.1),
    np.bool_(1),
    (1, (2.5, "text"), [None, True, b"\x00"]),
    {"a": {1: (torch.ones(2), -(1 << 90))}, ("x", 2): []},
    1 << 63,
    float("inf"),
]


@pytest.mark.parametrize("sample", EXACT, ids=repr)
def test_a_sample_comes_back_equal_in_every_bit_and_may_be_written(sample: Any) -> None:
    found = sample_of(sample_bytes(sample))
    assert plain(found) == plain(sample)
    if isinstance(found, Tensor) and found.dim():
        found.zero_()
    if isinstance(found, np.ndarray):
        assert found.flags.writeable


class Own(dict):  # type: ignore[type-arg]  # any
    """Not a dict alone."""


REFUSED: dict[str, Callable[[], Any]] = {
    "an object": object,
    "a kind of dict": Own,
    "a gradient": lambda: torch.ones(2, requires_grad=True),
    "a sparse tensor": lambda: torch.eye(2).to_sparse(),
    "numbers that share memory": lambda: torch.ones(1).expand(3),
    "windows that share memory": lambda: torch.arange(5).unfold(0, 3, 1),
    "a parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    "objects": lambda: np.array([object()]),
    "rows with gaps": lambda: np.arange(12).reshape(3, 4)[:, :2],
    "no text": lambda: "\ud800",
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_what_is_more_than_its_bytes_is_refused(what: str) -> None:
    with pytest.raises(kept_samples._NOT_KEPT):
        sample_bytes([{"deep": REFUSED[what]()}])


# -- what a restart finds


class Rows:
    """Rows of numbers; remembers which were prepared."""

    fingerprint = "rows"

    def __init__(self, draws: bool = False, value: Any = None) -> None:
        self.prepared: list[int] = []
        self.draws, self.value = draws, value

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        self.prepared.append(index)
        return torch.rand(2) if self.draws else self.value or (torch.full((2,), float(index)), {"label": index})


def kept(folder: Path, data: Any, *, began_ns: int = LATER, most_bytes: int = 1 << 20) -> KeptSamples:
    session: Any = SimpleNamespace(directory=SimpleNamespace(path=folder))
    return KeptSamples(data, lambda: session, began_ns=began_ns, most_bytes=most_bytes)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("samples/*/*"))


def prepare(folder: Path, keys: list[int], data: Rows | None = None, **options: Any) -> list[Any]:
    """Prepare samples as a process that was there from the beginning; the first one of a process is not kept."""
    samples = kept(folder, data or Rows(), began_ns=0, **options)
    return samples.__getitems__([99, *keys])[1:]


def test_batches_of_other_ranks_come_from_memory_in_any_order(tmp_path: Path) -> None:
    before = prepare(tmp_path, [0, 2, 4]) + prepare(tmp_path, [1, 3, 5])  # of two ranks
    rows = Rows()
    samples = kept(tmp_path, rows)
    found = samples.__getitems__([5, 4, 3, 2, 6, 1, np.int64(0)])
    assert rows.prepared == [6]
    assert [label["label"] for _, label in found] == [5, 4, 3, 2, 6, 1, 0]
    assert plain(found[-1]) == plain(before[0])
    samples.__getitems__([5, 4])
    assert rows.prepared == [6, 5, 4], "each once: in the next epoch it may be another"


def test_a_process_takes_nothing_that_it_has_kept_itself(tmp_path: Path) -> None:
    rows = Rows()
    for _ in range(2):  # as workers of two epochs
        kept(tmp_path, rows, began_ns=1).__getitems__([98, 7])
    assert rows.prepared == [98, 7] * 2


def test_without_a_job_and_for_other_keys_samples_are_prepared_as_always(tmp_path: Path) -> None:
    rows = Rows()
    samples = KeptSamples(rows, lambda: None, began_ns=LATER, most_bytes=1 << 20)
    assert samples[3][1] == {"label": 3}
    assert len(samples) == 100
    assert samples.fingerprint == "rows"
    words = kept(tmp_path, {"a": 1, "b": 2})
    assert (words["b"], words.__getitems__(["a", "b"])) == (2, [1, 2])
    assert files(tmp_path) == []


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "a flipped bit": lambda raw: raw[:-3] + bytes([raw[-3] ^ 1]) + raw[-2:],
    "cut short": lambda raw: raw[:-1],
    "empty": lambda _: b"",
    "of another sample": lambda _: b"",
}


@pytest.mark.parametrize("how", DAMAGE)
def test_what_is_damaged_is_prepared_again(how: str, tmp_path: Path) -> None:
    prepare(tmp_path, [1, 2])
    (path,) = tmp_path.glob("samples/*/1")
    if how == "of another sample":
        path.with_name("2").replace(path)
    else:
        path.write_bytes(DAMAGE[how](path.read_bytes()))
    rows = Rows()
    assert kept(tmp_path, rows)[1][1] == {"label": 1}
    assert rows.prepared == [1]


def test_what_stands_in_place_of_a_file_is_not_opened(tmp_path: Path) -> None:
    prepare(tmp_path, [1])
    (path,) = tmp_path.glob("samples/*/1")
    path.unlink()
    os.mkfifo(path)
    rows = Rows()
    assert kept(tmp_path, rows)[1][1] == {"label": 1}
    assert rows.prepared == [1]


def test_killed_while_a_sample_is_written_it_is_prepared_again(tmp_path: Path) -> None:
    killed_at("sample.before-rename:2", lambda: prepare(tmp_path, [1, 2, 3]))
    assert [name.split(".")[0] for name in files(tmp_path)] == ["", "1"]
    rows = Rows()
    assert [label["label"] for _, label in kept(tmp_path, rows).__getitems__([1, 2, 3])] == [1, 2, 3]
    assert rows.prepared == [2, 3]


def test_the_oldest_samples_make_room_and_those_of_earlier_processes_first(tmp_path: Path) -> None:
    prepare(tmp_path, [1, 2, 3])
    size = next(tmp_path.glob("samples/*/1")).stat().st_size
    for number, path in enumerate(sorted(tmp_path.glob("samples/*/*"))):
        os.utime(path, ns=(time_of(number), time_of(number)))
    samples = kept(tmp_path, Rows(), began_ns=time_of(10), most_bytes=2 * size)
    samples.__getitems__([50, 51, 52])  # the first one is not kept
    assert files(tmp_path) == ["2", "3", "51", "52"], "no more than twice the room, of both together"
    samples.__getitems__([53])
    assert files(tmp_path) == ["52", "53"]
    kept(tmp_path, Rows(), most_bytes=size - 1).__getitems__([60, 61])
    assert "61" not in files(tmp_path)


def test_a_sample_of_two_epochs_or_processes_is_there_once_and_stays(tmp_path: Path) -> None:
    prepare(tmp_path, [1])
    size = next(tmp_path.glob("samples/*/1")).stat().st_size
    first, second = (kept(tmp_path, Rows(), began_ns=0, most_bytes=3 * size) for _ in range(2))
    first.__getitems__([99, 1, 2, 1, 2, 1, 2])
    assert files(tmp_path) == ["1", "2"]
    first.__getitems__([3, 1])
    second.__getitems__([99, 2])
    first.__getitems__([4])
    assert files(tmp_path) == ["1", "2", "3", "4"], "2 is that of the second process"


def time_of(number: int) -> int:
    return time.time_ns() - (100 - number) * 10**9


def test_what_is_an_hour_old_is_removed(tmp_path: Path) -> None:
    prepare(tmp_path, [1, 2])
    (path,) = tmp_path.glob("samples/*/1")
    os.utime(path, ns=(time_of(-3600), time_of(-3600)))
    rows = Rows()
    kept(tmp_path, rows).__getitems__([1, 2])
    assert rows.prepared == [1]


def test_other_data_code_or_seed_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path, [1])
    rows = Rows()
    rows.fingerprint = "other rows"
    kept(tmp_path, rows)[1]
    assert rows.prepared == [1]
    monkeypatch.setattr(kept_samples, "_file_of", lambda _: "another file")
    rows = Rows()
    kept(tmp_path, rows)[1]
    assert rows.prepared == [1]
    monkeypatch.undo()
    assert len({kept_samples._identity(SeededSamples(Rows(), seed=seed)) for seed in (1, 2)}) == 2


def test_what_cannot_be_kept_is_said_once_in_a_job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        value = [object()]
        assert prepare(tmp_path, [1], Rows(value=value)) == [value]
    assert [record.message for record in caplog.records] == [
        "samples are not kept for a restart: builtins.object; tensors, arrays, numbers, text, bytes, dicts, lists and tuples are"
    ]


def test_what_the_training_process_draws_is_drawn_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prepare(tmp_path, [1], Rows(draws=True))
    assert files(tmp_path) == []
    assert "draws at random in the training process" in caplog.text


def test_a_full_memory_costs_no_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept_samples.SampleRing, "keep", full)
    assert prepare(tmp_path, [1])[0][1] == {"label": 1}
    assert "No space left on device" in caplog.text


def test_memory_that_was_removed_is_not_made_again(tmp_path: Path) -> None:
    job = tmp_path / "job"
    job.mkdir()
    samples = kept(job, Rows(), began_ns=0)
    samples.__getitems__([99, 1])
    (job / "samples").rename(tmp_path / "gone")
    job.rmdir()
    assert [label["label"] for _, label in samples.__getitems__([2, 3])] == [2, 3]
    assert not job.exists()


def test_a_worker_that_is_not_forked_knows_the_folder(tmp_path: Path) -> None:
    prepare(tmp_path, [1])
    rows = Rows()
    assert copy.copy(kept(tmp_path, rows))[1][1] == {"label": 1}
    assert rows.prepared == []


# -- whole programs

CASES: dict[str, dict[str, Any]] = {
    "dropout": {},
    "augmentation in the training process": {"augment": True},
    "2 workers": {"workers": 2},
    "persistent workers, no epochs": {"workers": 2, "persistent": True, "loop": "forever"},
    "batch sampler": {"workers": 2, "batch_sampler": True},
    "SeededSamples": {"augment": True, "seeded": True, "workers": 2},
}


@pytest.mark.matrix
@pytest.mark.parametrize("case", CASES)
def test_killed_and_started_with_kept_samples_the_run_is_the_unbroken_one(case: str, tmp_path: Path) -> None:
    whole = program(tmp_path / "whole", **CASES[case])
    lines: list[str] = []
    for number, step in enumerate((3, 4, END_OF_EPOCH, 0)):
        lines += program(tmp_path / "killed", kill_at=step, started_seed=number, kept=True, **CASES[case])
    assert lines == whole


@pytest.mark.parametrize("is_kept", [True, False])
def test_the_batch_in_flight_is_not_prepared_again(is_kept: bool, tmp_path: Path) -> None:
    lives = []
    for life, step in enumerate((3, 4)):
        prepared = tmp_path / f"prepared-{life}"
        more: dict[str, Any] = {"loop": "ahead", "workers": 2, "length": 64, "kept": is_kept}
        program(tmp_path / "run", kill_at=step, prepared=str(prepared), **more)
        lives.append([int(line) for line in prepared.read_text().split()])
    from flashckpt.sampler import ElasticSampler

    fourth = set(list(ElasticSampler(64, 1, 0, seed=1, global_batch_size=4))[12:16])
    assert fourth <= set(lives[0]), "fetched ahead of step 3, at which the first life ends"
    assert bool(fourth & set(lives[1])) is not is_kept
