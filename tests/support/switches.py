"""The trainer's switches as a table, and runs in them that are killed and resumed: for the tests of pairs."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import flashckpt.session.checkpointer  # noqa: F401 -- imported before the fork, so that ranks start in 0.2 s
from flashckpt.errors import ConfigError, LayoutError
from flashckpt.trainer.config import from_values, to_values
from flashckpt.trainer.parallel.distributed import process_group
from flashckpt.trainer.parallel.layout import resolve_layout
from flashckpt.trainer.train import loop
from support.covering import Row
from support.documents import documents_run, write_documents
from support.ranks import run_ranks, values
from support.training import floats, run_config, train_rank, write_corpus

Sections = dict[str, dict[str, Any]]


def parallel(**settings: Any) -> Sections:
    """Return settings of [parallel]."""
    return {"parallel": settings}


FACTORS: dict[str, dict[str, Sections]] = {
    "keep": {
        "all": {},
        "full": parallel(activation_checkpoint="full"),
        "every:2": parallel(activation_checkpoint="every:2"),
        "groups:2": parallel(activation_checkpoint="groups:2"),
        "selective": parallel(activation_checkpoint="selective"),
        "ffn, moved": parallel(activation_checkpoint="ffn", activation_offload=True),
    },
    "data": {
        "one": parallel(dp_shard=1),
        "ddp": parallel(data_parallel="ddp", dp_replicate=2, dp_shard=1, bucket_mb=0.02),
        "zero 0": parallel(zero=0, dp_replicate=2, dp_shard=1),
        "zero 1": parallel(zero=1, dp_shard=2),
        "zero 2": parallel(zero=2, dp_shard=2),
        "zero 3": parallel(zero=3, dp_shard=2),
        "hsdp": parallel(dp_replicate=2, dp_shard=2),
    },
    "pipeline": {
        "none": {},
        "1F1B": parallel(pp=2),
        "interleaved": parallel(pp=2, schedule="Interleaved1F1B"),
        "zbv": parallel(pp=2, schedule="ZBVZeroBubble"),
    },
    "tensor": {
        "none": {},
        "sequence": parallel(tp=2),
        "loss": parallel(tp=2, sequence_parallel=False, loss_parallel=True),
    },
    "context": {"whole rows": {}, "cp 2": parallel(cp=2), "ring 2": parallel(cp=2, cp_exchange="ring")},
    "loss": {"whole": {}, "pieces": {"train": {"loss_chunk": 5}}},
    "precision": {"float32": {}, "bfloat16": {"train": {"precision": "bfloat16"}}, "float16": {"train": {"precision": "float16"}}},
    "state": {"device": {}, "host": parallel(offload="state")},
    "model": {
        "dense": {},
        "one kv head, tied": {"model": {"kv_heads": 1, "tied_embeddings": True}},
        "experts": {"model": {"experts": 4, "ffn": 32}},
        "experts, cut": {"model": {"experts": 4, "ffn": 32}, **parallel(ep=1)},
    },
    "rows": {"windows": {}, "documents": {"data": {"packing": "stream"}}},  # see `config_of`
}  # fmt: skip
STEPS, BEYOND = 2, 2
ALONE = ("precision", "model", "rows")
"""Factors that a run in one process has too."""


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Switches whose pairs are tried.

    Attributes:
        factors: Name -> values by name, the default first, each with the settings that it stands for.
        base: Settings of every row; `alone`: of the process that they are compared with.
        same: Factors that this process has too.
    """

    factors: Mapping[str, Mapping[str, Sections]]
    base: Sections = field(default_factory=dict)
    alone: Sections = field(default_factory=dict)
    same: tuple[str, ...] = ALONE

    @property
    def values(self) -> dict[str, list[str]]:
        """The names of all values."""
        return {name: list(values) for name, values in self.factors.items()}

    def sections_of(self, row: Row) -> Sections:
        """Return the settings of a row."""
        found = self._merged({"train": {"micro_batch": 1}, "parallel": {}, "model": {}}, self.base, row)
        degrees = found["parallel"]
        found["train"]["global_batch"] = 2 * degrees.get("dp_replicate", 1) * degrees["dp_shard"]
        return found

    def sections_alone(self, row: Row) -> Sections:
        """Return the settings of the process that a row is compared with."""
        train = {"micro_batch": 1, "global_batch": self.sections_of(row)["train"]["global_batch"]}
        return self._merged({"train": train}, self.alone, {name: row[name] for name in self.same})

    def _merged(self, start: Sections, base: Sections, row: Row) -> Sections:
        merged = start
        for sections in (base, *(self.factors[factor][value] for factor, value in row.items())):
            for section, content in sections.items():
                merged[section] = {**merged.get(section, {}), **content}
        return merged

    def works(self, row: Row) -> bool:
        """Return whether a row can be run: it is not refused, and needs 8 ranks at most."""
        sections = self.sections_of(row)
        try:
            resolve_layout(run_config(Path("unused"), **sections), world_of(sections))
        except (LayoutError, ConfigError):
            return False
        return world_of(sections) <= 8

    def name_of(self, row: Row) -> str:
        """Return what a row has that is not the default."""
        return ", ".join(value for factor, value in row.items() if value != next(iter(self.factors[factor])))


def world_of(sections: Sections) -> int:
    """Return how many ranks a row needs."""
    size = 1
    for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp"):
        size *= sections["parallel"].get(name, 1)
    return size


def write_texts(folder: Path) -> tuple[Path, list[str]]:
    """Write documents and a little text into a folder; return what `config_of` takes as its corpus."""
    (folder / "documents").mkdir()
    write_documents(folder / "documents")
    return folder, write_corpus(folder / "text")


def config_of(corpus: Any, sections: Sections, **more: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a small run over a corpus."""
    folder, source = corpus
    optim = {"schedule": "constant", "warmup_steps": 1}
    data: dict[str, Any] = {"source": source}
    if "data" in sections:  # several in a row, each seen by its own tokens alone
        data = to_values(documents_run(folder / "documents", {}))["data"]
    return to_values(run_config(folder, **{"optim": optim, **sections, **more, "data": data}))


def trained(trainer: Any, steps: int) -> dict[int, str]:
    """Train some steps; return the loss of each."""
    records = [trainer.one_step() for _ in range(steps)]
    return {record.step: record.loss.hex() for record in records}


def run_leg(rank: int, values: dict[str, Any], folder: str, leg: str) -> None:
    """Restore and train; the losses go to a file, for in the leg "killed" the ranks then die in the middle of a step."""
    config = from_values(values)
    layout = loop.prepare(config, int(os.environ["WORLD_SIZE"]))
    with process_group(config) as device:
        trainer = loop.Trainer(config, layout, device)
        trainer._restore()
        began = trainer.done
        losses = trained(trainer, STEPS - began)
        kept, trainer.ckpt = trainer.ckpt, None  # from here on nothing is recorded
        losses |= trained(trainer, BEYOND)
        Path(folder, f"{leg}-{rank}").write_text(json.dumps({"began": began, "losses": losses}))
        if leg == "killed":
            trainer._apply = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign, assignment]  # dies there
            trainer.one_step()
        assert kept is not None


def results(folder: Path, leg: str, world: int) -> list[dict[str, Any]]:
    """Return what the ranks of a leg wrote."""
    return [json.loads((folder / f"{leg}-{rank}").read_text()) for rank in range(world)]


class Alone:
    """What one process trains, each run once.

    Args:
        switches: Whose rows are compared with it.
        corpus: As `write_texts` gives it.
    """

    def __init__(self, switches: Switches, corpus: Any) -> None:
        self._switches, self._corpus = switches, corpus
        self._known: dict[str, list[float]] = {}

    def __call__(self, row: Row) -> list[float]:
        """Return the losses that a row is compared with."""
        own = self._switches.sections_alone(row)
        if repr(own) not in self._known:
            config = config_of(self._corpus, own)
            (only,) = values(run_ranks(train_rank, 1, config, STEPS + BEYOND, timeout_s=100))
            self._known[repr(own)] = floats(only["losses"])
        return self._known[repr(own)]


def killed_and_resumed(sections: Sections, corpus: Any, tmp_path: Path, *, timeout_s: float = 200) -> list[float]:
    """Train, kill every rank in the middle of a step and continue; return the losses, which are the same bits both times."""
    world = world_of(sections)
    checkpoint = {"root": str(tmp_path / "root"), "job": "switches", "snapshot_every": 1, "persist_every": 1000}
    config = config_of(corpus, sections, checkpoint=checkpoint)
    ended = run_ranks(run_leg, world, config, str(tmp_path), "killed", timeout_s=timeout_s)
    assert {rank.signal for rank in ended} == {signal.SIGKILL}, ended[0].error
    values(run_ranks(run_leg, world, config, str(tmp_path), "resumed", timeout_s=timeout_s))
    killed, resumed = (results(tmp_path, leg, world) for leg in ("killed", "resumed"))
    wanted: dict[str, str] = killed[0]["losses"]
    for rank in (*killed, *resumed):
        assert rank["losses"] == {step: loss for step, loss in wanted.items() if int(step) > rank["began"]}
    assert {rank["began"] for rank in killed} == {0}
    assert {rank["began"] for rank in resumed} <= {STEPS - 1, STEPS}
    return floats(list(wanted.values()))
