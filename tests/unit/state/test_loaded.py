"""Tracked objects get their state by their own methods: taken, or an error that names the object; nothing right is refused."""

from __future__ import annotations

import io
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.daemons import QUICK, turn_until
from support.one_rank import agent_of_the_test, crash, opened, step_kept  # noqa: F401 -- fixtures
from torch import nn
from torchdata.nodes import Batcher, Loader, MapStyleWrapper, ParallelMapper, Prefetcher, SamplerWrapper

from flashckpt import Checkpointer
from flashckpt.checkpoint.catalog import list_checkpoints
from flashckpt.daemon.persister.service import Daemon
from flashckpt.errors import ObjectStateError
from flashckpt.shm.job_directory import JobDirectory
from flashckpt.state.loaded import is_ours
from flashckpt.storage.factory import open_store

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # of torch, by torchdata

VALUES: dict[str, Callable[[int], Any]] = {
    "number": lambda n: n,
    "fraction": lambda n: n / 3,
    "not a number": lambda n: [n, float("nan")],
    "text": lambda n: f"at {n}",
    "bytes": lambda n: bytes([n]),
    "switch": lambda n: n > 0,
    "nothing, then something": lambda n: n or None,
    "tensor": lambda n: torch.full((3,), float(n)),
    "large tensor": lambda n: torch.arange(300_000) + n,
    "growing tensor": lambda n: torch.zeros(n + 1),
    "array": lambda n: np.arange(n, n + 4),
    "scalar": np.float32,
    "file": lambda n: io.BytesIO(bytes([n])),
    "list": lambda n: [1, [n, "a"]],
    "growing list": lambda n: list(range(n)),
    "nested": lambda n: {"a": {"b": [{"c": n}]}, "same": 1},
    "by number": lambda n: {n: "seen"},
}


class Faithful:
    """Takes what it is given."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"kept": 7, "value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Deaf(Faithful):
    """Takes nothing."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Taking(Faithful):
    """Empties the dict that it is given."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state.pop("value")
        state.clear()


class Lazy(Faithful):
    """Has it at its next use: until then it says what it said before."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.coming = state


class LazyPart(Faithful):
    """The same, in an object that it has."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.inner = Faithful(None)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.value = state["value"]


class Renewed(Faithful):
    """Of a newer version: one key is gone and another one is new; and it says when it was asked, and by whom."""

    def state_dict(self) -> dict[str, Any]:
        clocks = {"at": time.time(), "whole": int(time.time()), "fine": time.perf_counter_ns(), "process": os.getpid()}
        return {"value": self.value, "new": 1, **clocks}


class Pickled(Faithful):
    """Says the same in other bytes from its load on, as a pickle does."""

    salt = b""

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [self.salt + self.value]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.salt = state["parts"][0], b"again"


class DeafPickled(Pickled):
    """Takes nothing."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def restored(root: Path, recorded: Any, live: Any) -> None:
    """Record one object, and give its state to another."""
    ckpt = opened(root, thing=recorded)
    step_kept(ckpt, 1)
    crash(ckpt)
    crash(opened(root, thing=live))


@pytest.mark.matrix
@pytest.mark.parametrize("kind", [Faithful, Taking, Lazy, LazyPart, Renewed])
@pytest.mark.parametrize("value", VALUES)
def test_what_takes_its_state_sooner_or_later_is_not_refused(kind: type[Faithful], value: str, tmp_path: Path) -> None:
    recorded: Any = kind(VALUES[value](5))
    if kind is Renewed:
        recorded.state_dict = lambda: {
            "value": recorded.value,
            "old": 2,
            "at": 1.0,
            "whole": 1,
            "fine": 1,
            "process": 1,
        }
    restored(tmp_path, recorded, kind(VALUES[value](0)))


def test_bytes_that_the_load_has_changed_are_not_refused(tmp_path: Path) -> None:
    restored(tmp_path, Pickled(b"at 5"), Pickled(b"at 0"))


def test_bytes_that_the_load_has_left_as_they_were_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ObjectStateError, match="does not come back"):
        restored(tmp_path, Pickled(b"at 5"), DeafPickled(b"at 0"))


@pytest.mark.parametrize("value", VALUES)
def test_what_does_not_take_its_state_is_an_error_with_its_name(value: str, tmp_path: Path) -> None:
    with pytest.raises(
        ObjectStateError, match="the tracked object 'thing' does not come back as it was recorded"
    ) as caught:
        restored(tmp_path, Faithful(VALUES[value](5)), Deaf(VALUES[value](0)))
    assert "Deaf.state_dict()['value']" in caught.value.found
    assert caught.value.remedy


class Else(Faithful):
    """Has something else in the place of what it is given."""

    make: Callable[[Any], Any]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = type(self).make(state["value"])


ELSE: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "nothing for a tensor": (torch.ones(3), lambda _: None),
    "text for a tensor": (torch.ones(3), lambda _: "x"),
    "half of the bits": (torch.full((3,), 0.1), torch.Tensor.bfloat16),
    "a quarter of the bits": (torch.full((3,), 1.3), lambda kept: kept.to(torch.float8_e4m3fn)),
    "eight bits that are others": (
        torch.ones(3).to(torch.float8_e5m2),
        lambda kept: torch.full((3,), 2.0).to(kept.dtype),
    ),
    "a tensor for a dict": ({"a": 1}, lambda _: torch.zeros(2)),
    "nothing for an array": (np.ones(3), lambda _: None),
    "one element of a large tensor": (torch.ones(300_001), lambda t: t.index_fill(0, torch.tensor([77]), 0.0)),
    "one of many in 8 bits": (torch.ones(300_001, dtype=torch.int8), lambda t: t.index_fill(0, torch.tensor([9]), 0)),
    "deep inside": ({"a": [{"b": np.arange(3)}]}, lambda v: {**v, "a": [{"b": np.zeros(3, np.int64)}]}),
    "under another name": (
        {"a": torch.ones(3), "b": torch.full((3,), 2.0)},
        lambda v: {"a": v["a"], "c": torch.zeros(3)},
    ),
}


@pytest.mark.parametrize("kind", ELSE)
def test_another_thing_in_the_place_of_a_value_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value, make = ELSE[kind]
    monkeypatch.setattr(Else, "make", make, raising=False)
    with pytest.raises(ObjectStateError, match="does not come back as it was recorded"):
        restored(tmp_path, Faithful(value), Else(None))


def test_a_tensor_that_a_newer_version_calls_otherwise_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Else, "make", lambda v: {"a": v["a"], "new": v["old"]}, raising=False)
    restored(tmp_path, Faithful({"a": torch.ones(3), "old": torch.full((3,), 2.0)}), Else(None))


class Inside:
    """A module in an object, loaded as `strict=False` does it."""

    def __init__(self, *more: str) -> None:
        self.module = nn.Linear(2, 2)
        for name in more:
            self.module.register_parameter(name, nn.Parameter(torch.zeros(2)))

    def state_dict(self) -> Any:
        return self.module.state_dict()

    def load_state_dict(self, state: Any) -> Any:
        return self.module.load_state_dict(state, strict=False)


class Part(Inside):
    """Keeps only a part of it, as adapters are kept."""

    def state_dict(self) -> Any:
        return {"bias": self.module.bias}


@pytest.mark.parametrize("kind", [Inside, Part])
def test_keys_that_are_no_part_of_the_state_may_be_missing(kind: Any, tmp_path: Path) -> None:
    restored(tmp_path, kind("more"), kind("more"))


@pytest.mark.parametrize("more", [(("old",), ()), ((), ("new",))])
def test_keys_that_strict_false_passes_over_are_refused(more: Any, tmp_path: Path) -> None:
    with pytest.raises(ObjectStateError) as caught:
        restored(tmp_path, *(Inside(*names) for names in more))
    assert "load_state_dict() returned keys: 1 that it" in caught.value.found
    assert f"(first: '{(more[0] or more[1])[0]}')" in caught.value.found


class Counting(Faithful):
    """Is another one each time it is read."""

    def state_dict(self) -> dict[str, Any]:
        self.value += 1
        return {"value": self.value}


def test_what_changes_when_it_is_read_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="flashckpt"):
        restored(tmp_path, Counting(0), Counting(50))
    assert caplog.text.count("'thing': ['value'] of its state changes each time it is read") == 1


class Other:
    """Says the same in other types: a tuple for a list, a float for an int, 64 bits for 32."""

    def __init__(self, *, first: bool) -> None:
        self.first = first

    def state_dict(self) -> dict[str, Any]:
        if self.first:
            return {
                "a": (1, 2),
                "b": 3,
                "c": np.int64(4),
                "d": torch.ones(2),
                "e": True,
                "f": None,
                "g": torch.tensor(2),
            }
        return {"a": [1, 2], "b": 3.0, "c": 4, "d": torch.ones(2, dtype=torch.float64), "e": 1, "f": [], "g": 2}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_an_object_of_a_framework_in_one_of_ours_is_asked_as_the_users_own_are() -> None:
    from flashckpt.integrations.shared import OneForAllRanks
    from flashckpt.sampler import ElasticSampler

    assert is_ours(ElasticSampler(8))
    assert not is_ours(OneForAllRanks(Faithful(1)))


def test_equal_values_of_other_types_are_equal(tmp_path: Path) -> None:
    restored(tmp_path, Other(first=True), Other(first=False))


def test_a_run_of_the_trainer_that_continues_with_other_settings_is_not_refused(tmp_path: Path) -> None:
    """What is of this project may say something else with other settings: what may change, it decides itself."""
    ours = type("Ours", (Deaf,), {"__module__": "flashckpt.trainer.train.record"})
    restored(tmp_path, Faithful(5), ours(0))


class Raising(Faithful):
    """Raises in one of its methods."""

    def __init__(self, method: str) -> None:
        super().__init__(1)
        self.method = method

    def state_dict(self) -> dict[str, Any]:
        return self.answer("state_dict")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.answer("load_state_dict")

    def answer(self, method: str) -> dict[str, Any]:
        if method == self.method:
            raise KeyError("a key of mine")
        return {"value": 1}


@pytest.mark.parametrize("method", ["state_dict", "load_state_dict"])
def test_what_an_objects_own_method_raises_names_the_object(method: str, tmp_path: Path) -> None:
    with pytest.raises(ObjectStateError) as caught:
        restored(tmp_path, Raising(""), Raising(method))
    assert caught.value.problem == f"{method}() of the tracked object 'thing' raised KeyError"
    assert "a key of mine" in caught.value.found
    assert isinstance(caught.value.__cause__, KeyError)
    assert "leave 'thing' out of track()" in caught.value.remedy


def test_the_same_in_step_and_in_the_extra_state_of_a_module(tmp_path: Path) -> None:
    class Extra(nn.Module):
        is_broken = False

        def get_extra_state(self) -> Any:
            return {"a": 1}

        def set_extra_state(self, state: Any) -> None:
            if self.is_broken:
                raise ValueError("no such state")

    model, thing = nn.Sequential(Extra()), Raising("")
    ckpt = opened(tmp_path, model=model, thing=thing)
    step_kept(ckpt, 1)
    thing.method = "state_dict"
    with pytest.raises(ObjectStateError, match=r"state_dict\(\) of the tracked object 'thing'"):
        ckpt.step(2)
    crash(ckpt)
    thing.method = ""
    Extra.is_broken = True
    with pytest.raises(ObjectStateError, match=r"set_extra_state\(\) of the tracked object 'model.0"):
        opened(tmp_path, model=model, thing=thing)


def test_no_older_snapshot_is_tried_in_the_place_of_one_that_an_object_refuses(tmp_path: Path) -> None:
    class Since(Faithful):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            assert state["value"] < 2, "of a newer version"
            super().load_state_dict(state)

    thing = Since(0)
    ckpt = opened(tmp_path, thing=thing)
    for step in (1, 2):
        thing.value = step
        step_kept(ckpt, step)
    crash(ckpt)
    with pytest.raises(ObjectStateError, match="raised AssertionError"):
        opened(tmp_path, thing=Since(0))


class Source:
    """A source of data that begins when it is asked for its state, and does not listen any more then."""

    def __init__(self) -> None:
        self.at, self.begun = 0, False

    def __iter__(self) -> Iterator[int]:
        self.begun = True
        while True:
            self.at += 1
            yield self.at

    def state_dict(self) -> dict[str, Any]:
        self.begun = True
        return {"at": self.at, "drawn": torch.zeros(self.at + 1)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not self.begun:
            self.at = state["at"]


class Wrapped:
    """An object of the user's around it."""

    def __init__(self) -> None:
        self.source = Source()

    def __iter__(self) -> Iterator[int]:
        return iter(self.source)

    def state_dict(self) -> dict[str, Any]:
        return {"source": self.source.state_dict(), "mine": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.source.load_state_dict(state["source"])


class Held(Wrapped):
    """An object that is none itself."""

    __iter__ = None  # type: ignore[assignment]  # no source by its own methods


def trained(root: Path, source: Any, *, steps: int, job: str) -> list[Any]:
    """Train some steps and die; return what was drawn."""
    ckpt = Checkpointer(str(root), snapshot_every=1, persist_every=2, job=job)
    ckpt.track(source=source, rng=True)
    report = ckpt.restore()
    first = report.step if report else 0
    seen = []
    draw = iter(source.source if type(source) is Held else source)
    for step in range(first + 1, first + steps + 1):
        seen.append(next(draw))
        step_kept(ckpt, step)
    crash(ckpt)
    return seen


@pytest.mark.parametrize("kind", [Source, Wrapped, Held])
def test_no_source_of_data_is_asked_for_its_state_before_it_has_it(kind: Any, tmp_path: Path, shm_dir: Path) -> None:
    """From memory, from storage, as a warm start after a fresh one, and by a reader; killed at each step."""
    root = tmp_path / "root"
    seen = [trained(root, kind(), steps=1, job="t") for _ in range(4)]
    assert seen == [[1], [2], [3], [4]]
    directory = JobDirectory.open("t")
    lock = directory.hold_daemon()
    assert lock is not None
    daemon = Daemon(directory, lock, QUICK)
    turn_until(daemon, lambda: list_checkpoints(open_store(root)), "a commit")
    daemon.close()
    assert trained(root, kind(), steps=1, job="elsewhere") == [5], "from storage"
    warm, read = kind(), kind()
    ckpt = Checkpointer(str(tmp_path / "other"), snapshot_every=1, job="warm")
    ckpt.track(source=warm)
    assert ckpt.restore() is None
    assert ckpt.restore(root=str(root), step=4)
    assert next(iter(getattr(warm, "source", warm))) == 5
    step_kept(ckpt, 5)
    crash(ckpt)
    reader = Checkpointer.readonly(str(root))
    reader.track(source=read)
    assert reader.restore(step=4)
    assert next(iter(getattr(read, "source", read))) == 5


def drawn(number: int) -> tuple[int, float]:
    """A sample with augmentation from the default generator."""
    return number, float(torch.rand(()))


NODES: dict[str, Callable[[], Any]] = {
    "plain": lambda: Batcher(MapStyleWrapper(_Drawn(), torch.utils.data.SequentialSampler(range(14))), 2),
    "prefetched": lambda: Prefetcher(Batcher(SamplerWrapper(range(14)), 2), 3),
    "mapped in threads": lambda: Batcher(
        ParallelMapper(SamplerWrapper(range(14)), lambda i: i * 2, 2, method="thread"), 2
    ),
    "shuffled by a seed": lambda: Batcher(SamplerWrapper(_shuffled()), 2),
}


class _Drawn:
    def __getitem__(self, number: int) -> tuple[int, float]:
        return drawn(number)


def _shuffled() -> Any:
    return torch.utils.data.DistributedSampler(range(14), num_replicas=1, rank=0, shuffle=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", NODES)
def test_nodes_of_torchdata_continue_at_the_next_batch(kind: str, tmp_path: Path) -> None:
    """Killed at each step, over the end of an epoch of seven batches, with what their samples draw."""
    torch.manual_seed(5)
    whole = trained(tmp_path / "whole", Loader(NODES[kind]()), steps=6, job="whole")
    torch.manual_seed(5)
    seen = []
    for _ in range(6):
        seen += trained(tmp_path / "cut", Loader(NODES[kind]()), steps=1, job="cut")
        torch.manual_seed(6)
    assert seen == whole


def test_arrays_that_nobody_may_write_are_held_without_a_warning(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    fixed = np.arange(6)
    fixed.flags.writeable = False
    shown = np.broadcast_to(np.float32(2), (2, 3))
    lives = [Faithful({"fixed": fixed, "shown": shown, "view": fixed[::2]}), Faithful(None)]
    restored(tmp_path, *lives)
    assert not recwarn.list
    assert all(np.array_equal(lives[1].value[key], held) for key, held in lives[0].value.items())
