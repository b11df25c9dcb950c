"""What FLASHCKPT_AFTER_COMMIT asks for: of which checkpoints, by which command, where to, and whether that is there already."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click

from flashckpt.checkpoint.catalog import CheckpointInfo, list_checkpoints
from flashckpt.checkpoint.marks import keep_as, named_marks
from flashckpt.checkpoint.retention import kept_prefixes
from flashckpt.checkpoint.root_records import MANIFEST, read_generations
from flashckpt.cli.common import human_bytes, parse_options
from flashckpt.console.copying import copy_checkpoint
from flashckpt.console.cp import cp
from flashckpt.console.keep import BEST, best, keep
from flashckpt.core.lineage import is_rolled_back
from flashckpt.errors import ConfigError
from flashckpt.interop import safetensors_files as st
from flashckpt.interop.export_command import export, export_checkpoint, wanted_of
from flashckpt.storage.factory import is_process_local, open_store
from flashckpt.storage.store import Store
from flashckpt.trainer.hub.command import export as hub_export
from flashckpt.trainer.hub.transfer import export_folder

_COMMANDS: dict[str, tuple[click.Command, str]] = {
    "export": (export, "to"), "hub": (hub_export, "folder"), "cp": (cp, "target"), "keep": (keep, "name"),
}  # fmt: skip
"""Each command, and its parameter for the target."""
_OURS = {"root", "step", "options", "as_json", "force"}
"""Parameters that are set here."""


@dataclass(frozen=True, slots=True)
class Task:
    """One command.

    Attributes:
        kind: A key of _COMMANDS.
        every: Steps: it wants each checkpoint whose step is a multiple; 0: those that are kept.
        target: Path or root, with placeholders; the name that the best is kept under.
        params: What the command takes beside that, by the name of its parameter.
    """

    kind: str
    every: int
    target: str
    params: Mapping[str, Any]

    def open_target(self) -> Store:
        """Return the root that checkpoints are copied to."""
        return open_store(self.target, **parse_options(self.params["target_options"]))

    def wants(self, info: CheckpointInfo, kept: Collection[str]) -> bool:
        """Return whether a checkpoint is one of those; by step none in which numbers became non-finite."""
        if not self.every:
            return info.prefix in kept
        return info.step > 0 and info.step % self.every == 0 and not info.suspects


class Due(NamedTuple):
    """One checkpoint for one task; `name` is what it is kept as, its step where it has no name."""

    task: Task
    info: CheckpointInfo
    name: str

    @property
    def place(self) -> str:
        """What is made: a path, or a folder of another root, or what a name stands for from then on."""
        if self.task.kind == "keep":
            return f"{self.task.target} of those up to {self.info.prefix}"
        if self.task.kind == "cp":
            return f"{self.task.target}/{self.info.prefix}"
        text = self.task.target
        for key, value in {"step": self.info.step, "generation": self.info.generation, "name": self.name}.items():
            text = text.replace(f"{{{key}}}", str(value))
        return text

    def is_there(self) -> bool:
        """Return whether it was made before, by whomever; a checkpoint that was deleted on another root counts as well."""
        if self.task.kind == "keep":
            return False
        if self.task.kind != "cp":
            return st.origin_of(Path(self.place)) == self.info.identity
        with contextlib.closing(self.task.open_target()) as store:
            return store.head(f"{self.info.prefix}/{MANIFEST}") is not None

    def make(self, store: Store, options: Mapping[str, Any]) -> str:
        """Make it; return what it is. Errors as those of the command."""
        if self.task.kind == "keep":
            prefix, value = best(store, **self.task.params, name=self.task.target)
            keep_as(store, prefix, self.task.target, value)
            return f"{prefix} with {value:g}"
        return human_bytes(self._copy(store, options))

    def _copy(self, store: Store, options: Mapping[str, Any]) -> int:
        params = self.task.params
        if self.task.kind == "export":
            wanted = wanted_of(**params, to=self.place, force=True)
            return int(export_checkpoint(store, self.info, wanted)["nbytes"])
        if self.task.kind == "hub":
            step = f"{self.info.step}.g{self.info.generation}"
            done = export_folder(store.url, Path(self.place), **params, step=step, options=options, force=True)
            return int(done["nbytes"])
        with contextlib.closing(self.task.open_target()) as other:
            other.check(write=True)
            return copy_checkpoint(store, self.info.prefix, other).nbytes


def read_tasks(commands: Sequence[Sequence[str]]) -> list[Task]:
    """Return the tasks in the value of FLASHCKPT_AFTER_COMMIT.

    Raises:
        ConfigError: A command does not take its words, or its target cannot be one.
    """
    return [_task(words) for words in commands]


def _task(words: Sequence[str]) -> Task:
    kind, rest, every = words[0], list(words[1:]), 0
    if kind == "hub":
        rest.remove("export")
    if "--kept" in rest:
        rest.remove("--kept")
    else:
        at = rest.index("--every")
        every = int(rest[at + 1])
        del rest[at : at + 2]
    command, key = _COMMANDS[kind]
    try:
        params = command.make_context(kind, ["", *rest], help_option_names=[]).params
    except click.UsageError as error:
        raise _wrong(words, error.format_message()) from error
    if asked := sorted(name for name in _OURS & params.keys() if params[name]):
        raise _wrong(words, f"{asked[0]}, which is set by the persister")
    if kind == "keep":
        if not every or params.pop("remove") or not (metric := params["metric"]):
            raise _wrong(words, "no --best METRIC --every STEPS")
        return Task(kind, every, params["name"] or BEST, {"metric": metric, "highest": params["highest"]})
    target = str(params.pop(key))
    _refuse(words, kind, target, params)
    return Task(kind, every, target, {name: one for name, one in params.items() if name not in _OURS})


def _refuse(words: Sequence[str], kind: str, target: str, params: dict[str, Any]) -> None:
    """Raise where a copy cannot be made beside training."""
    if kind == "export":
        if params["kind"] not in (None, "safetensors"):
            raise _wrong(words, f"--format {params['kind']}; safetensors alone is made beside training")
        params["kind"] = "safetensors"
    if not (target.startswith("/") or (kind == "cp" and "://" in target and not is_process_local(target))):
        raise _wrong(words, f"{target}, which is no absolute path")
    if kind != "cp" and not any(place in target for place in ("{step}", "{name}")):
        raise _wrong(words, f"{target}, in which neither {{step}} nor {{name}} tells exports apart")


def _wrong(words: Sequence[str], found: str) -> ConfigError:
    return ConfigError(
        f"invalid command {words[0]} in FLASHCKPT_AFTER_COMMIT", found=found,
        state="Nothing is exported or copied.", remedy="correct it, and start the job again",
    )  # fmt: skip


def due_now(store: Store, tasks: Sequence[Task]) -> list[Due]:
    """Return what the tasks want of the checkpoints on a root, the oldest first, whether it is there or not."""
    lineage = read_generations(store)
    infos = [one for one in list_checkpoints(store) if not is_rolled_back(one.identity, lineage)]
    names: dict[str, str] = {}
    if not all(task.every for task in tasks):
        names = dict.fromkeys(kept_prefixes(store), "") | {mark.prefix: name for name, mark in named_marks(store)}
    found = [
        Due(task, info, names.get(info.prefix) or str(info.step))
        for info in sorted(infos, key=lambda one: one.identity)
        for task in tasks
        if task.wants(info, names)
    ]
    newest = {due.task.target: due for due in found if due.task.kind == "keep"}  # the best of all is looked for
    return [due for due in found if due.task.kind != "keep" or newest[due.task.target] is due]
