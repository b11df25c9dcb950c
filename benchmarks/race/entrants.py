"""Who runs, in which environment, by which command, and how often it saves."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
VENVS = ROOT / ".race"
RESTARTS = "--max-restarts=3"  # as in torchrun's own examples
PATIENT = "--shutdown-timeout=5"  # torchrun 2.13 heeds it at its own end alone: before a restart it waits 30 s (`_stop_workers`)
WAITS_S = 5.0 + 30.0  # for a stopped rank: gloo's time-out (`problem.HANG_S`), then torchrun until SIGKILL
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", RESTARTS, PATIENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """One of the field.

    Attributes:
        name: Key of `table.TITLES`.
        venv: Folder below .race; "" for the project's own.
        launcher: Words after the Python of the environment.
        script: What the launcher starts, with its words.
        waits_s: How long its launcher does nothing about a stopped rank, of which all others know: known, not measured.
        off: The name of the run without checkpoints that its times are divided by.
        every: Steps between snapshots: the best of `--tune`, which writes intervals.json.
        persist: Steps between files, for those with a memory tier.
        pins: What pip installs into the environment, on top of torch of the project's.
        module: What must be importable there.
    """

    name: str
    venv: str
    launcher: tuple[str, ...] = TORCHRUN
    script: tuple[str, ...]
    waits_s: float = 0.0
    off: str = "loop"
    every: int = 10
    persist: int = 40
    pins: tuple[str, ...] = ()
    module: str = "torch"

    @property
    def python(self) -> Path:
        """The interpreter."""
        return VENVS / self.venv / "bin/python" if self.venv else Path(sys.executable)

    def command(self, ranks: int) -> list[str]:
        """Return the command line."""
        return [
            str(self.python),
            *self.launcher,
            f"--nproc-per-node={ranks}",
            str(HERE / self.script[0]),
            *self.script[1:],
        ]

    def setup(self) -> str:
        """Make the environment where it is missing; return why it cannot be used, "" where it can.

        It sees the packages of the project's environment, but not the project: a line of a .pth names a folder, whose
        own .pth files Python does not read.
        """
        if not self.venv:
            return ""
        here = VENVS / self.venv
        if not self.python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(here)], check=True)
        folder = subprocess.run([str(self.python), "-c", PURELIB], capture_output=True, text=True, check=True)
        base = subprocess.run([sys.executable, "-c", PURELIB], capture_output=True, text=True, check=True)
        (Path(folder.stdout.strip()) / "base.pth").write_text(base.stdout)
        leaks = subprocess.run([str(self.python), "-c", LEAKS], check=False, cwd="/")
        if leaks.returncode:
            return "flashckpt can be imported in it"
        stamp, wanted = here / ".ready", repr((sys.version, version("torch"), self.pins, self.module))
        if stamp.exists() and stamp.read_text() == wanted:
            return ""
        if self.pins and self._lacks():
            pip = [str(self.python), "-m", "pip", "--timeout", "20", "install", "--quiet", *self.pins]
            subprocess.run(pip, check=False, timeout=600, stderr=subprocess.DEVNULL)
        if not (why := self._lacks()):
            stamp.write_text(wanted)
        return why

    def _lacks(self) -> str:
        tried = subprocess.run(
            [str(self.python), "-c", f"import {self.module}"], check=False, capture_output=True, text=True
        )
        return tried.stderr.strip().rpartition("\n")[2] if tried.returncode else ""


LEAKS = 'import importlib.util, sys; sys.exit(importlib.util.find_spec("flashckpt") is not None)'
PURELIB = 'import sysconfig; print(sysconfig.get_path("purelib"))'
ENTRANTS = (
    Entrant(
        name="flashckpt",
        venv="",
        launcher=("-m", "flashckpt.daemon.run", "--hang-timeout=5"),
        script=("loop.py", "flashckpt"),
    ),
    Entrant(
        name="dlrover",
        venv="dlrover",
        launcher=(str(HERE / "dlrover_launch.py"), "--standalone", RESTARTS, PATIENT),
        script=("loop.py", "dlrover"),
        waits_s=WAITS_S,
        pins=("dlrover[torch]==0.6.1", "kubernetes==37.0.2"),
        module="kubernetes, dlrover.trainer.torch.elastic_run",
    ),
    Entrant(name="dcp", venv="torch", script=("loop.py", "dcp"), waits_s=WAITS_S),
    Entrant(
        name="torch_checkpointing",
        venv="torch_checkpointing",
        script=("loop.py", "torch_checkpointing"),
        waits_s=WAITS_S,
        pins=("--no-deps", "torch_checkpointing==0.1.1"),
        module="torch_checkpointing",
    ),
    Entrant(name="torch_save", venv="torch", script=("loop.py", "torch_save"), waits_s=WAITS_S),
    Entrant(
        name="huggingface",
        venv="huggingface",
        script=("hf_trainer.py",),
        waits_s=WAITS_S,
        off="huggingface",
        pins=("transformers==5.23.0", "accelerate==1.15.0"),
        module="transformers, accelerate",
    ),
    Entrant(
        name="lightning",
        venv="lightning",
        script=("lightning_trainer.py",),
        waits_s=WAITS_S,
        off="lightning",
        pins=("lightning==2.6.6",),
        module="lightning",
    ),
    Entrant(
        name="torchft",
        venv="torchft",
        launcher=(str(HERE / "torchft_launch.py"),),
        script=("torchft_trainer.py",),
        pins=("torchft==0.2.0",),
        module="torchft",
    ),
)


def tuned() -> tuple[Entrant, ...]:
    """Return the entrants with the intervals that `--tune` found."""
    path = HERE / "intervals.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    return tuple(replace(entrant, **found.get(entrant.name, {})) for entrant in ENTRANTS)


PLAIN = Entrant(name="loop", venv="torch", script=("loop.py", "none"))
"""The loop without checkpoints."""
