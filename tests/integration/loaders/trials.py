"""Runs one trial of a workload: a job that is killed, or goes on with other workers or ranks, against an unbroken one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from support.dlrun import run_dlrun
from support.paths import ROOT

from integration.loaders.workloads import EPOCHS, EXACT, GLOBAL_BATCH, KILLS, RANKS, REFUSED, SAMPLES, WORKERS, Workload

JOB = ROOT / "tests/integration/loaders/job.py"
STEPS_OF_EPOCH = SAMPLES // GLOBAL_BATCH
STEPS = EPOCHS * STEPS_OF_EPOCH
KILLED = (3, 6, STEPS_OF_EPOCH, STEPS_OF_EPOCH + 1)
"""Twice in an epoch, after its last step, and after the first one of the next."""
_REFUSAL = re.compile(r"\b(?:SamplerState|Config)Error: (?P<problem>[^\n]+)")
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


class Verdict(NamedTuple):
    """What came out: EXACT, REFUSED, or else what is wrong; and the words of a refusal."""

    outcome: str
    message: str = ""


class Run(NamedTuple):
    """The end of a job."""

    code: int
    output: str
    lines: list[dict[int, str]]

    def ids(self) -> dict[int, list[int]]:
        """Return step -> the samples of all ranks, sorted."""
        steps = sorted({step for one in self.lines for step in one})
        return {
            step: sorted(int(i) for one in self.lines if step in one for i in one[step].split()[0].split(","))
            for step in steps
        }


class Trials:
    """All trials of one workload.

    Args:
        workload: It.
        folder: Empty but for `data`.
    """

    def __init__(self, workload: Workload, folder: Path) -> None:
        self._workload, self._folder = workload, folder
        self._whole: dict[tuple[int, int], Run] = {}

    def run(self, trial: str) -> Verdict:
        """Return what came out of it."""
        if trial == KILLS:
            return self._killed("killed", workers=[max(self._workload.workers)], kills=KILLED)
        if trial == WORKERS:
            return self._killed("workers", workers=list(self._workload.workers), kills=KILLED[:2])
        return self._other_ranks()

    def _killed(self, name: str, *, workers: list[int], kills: tuple[int, ...]) -> Verdict:
        whole = self._unbroken(1, workers[0])
        found = self._job(name, 1, "--kills", ",".join(map(str, kills)), "--workers", ",".join(map(str, workers)))
        return self._verdict(found, whole, is_equal=found.lines == whole.lines)

    def _other_ranks(self) -> Verdict:
        whole = self._unbroken(2, 0)
        found = whole
        for ranks, steps in ((2, 5), (1, STEPS_OF_EPOCH), (2, 0)):
            found = self._job("ranks", ranks, "--steps", steps, of_ranks=2)
            if found.code:
                break
        return self._verdict(found, whole, is_equal=found.ids() == whole.ids())

    def _unbroken(self, ranks: int, workers: int) -> Run:
        if (ranks, workers) not in self._whole:
            self._whole[ranks, workers] = self._job(f"whole-{ranks}-{workers}", ranks, "--workers", workers)
        return self._whole[ranks, workers]

    def _verdict(self, found: Run, whole: Run, *, is_equal: bool) -> Verdict:
        for run in (found, whole):
            error = _REFUSAL.search(run.output)
            if run.code and error is None:
                return Verdict(f"ended with {run.code}", run.output[-3000:])
            if run.code and error is not None:
                return Verdict(REFUSED, error["problem"])
        every = sorted(i for ids in whole.ids().values() for i in ids)
        if every != sorted(list(range(SAMPLES)) * EPOCHS):
            return Verdict("the unbroken run does not train every sample once in an epoch", str(whole.ids()))
        return Verdict(EXACT) if is_equal else Verdict("other samples", f"{found.lines}\ninstead of\n{whole.lines}")

    def _job(self, name: str, ranks: int, *words: object, of_ranks: int = 0) -> Run:
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        if of_ranks:
            for rank in range(ranks, of_ranks):  # what a rank that is not there any more said stays in its steps
                (folder / f"rank{rank}.txt").touch()
        env = {**_OFFLINE, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "HF_HOME": str(self._folder / "hf")}
        code, output = run_dlrun(
            folder,
            "--nproc-per-node", ranks, "--max-restarts", 9, JOB, folder, self._workload.name, *words,
            deadline_s=240, fresh=True, env=env,
        )  # fmt: skip
        return Run(code, output, [_lines(folder / f"rank{rank}.txt") for rank in range(of_ranks or ranks)])


def _lines(path: Path) -> dict[int, str]:
    """Return what a rank said of each step, the last time it trained it."""
    said = path.read_text().splitlines() if path.exists() else []
    return {int(line.split()[0]): line.split(maxsplit=1)[1] for line in said}


__all__ = ["EXACT", "RANKS", "REFUSED", "Trials", "Verdict"]
