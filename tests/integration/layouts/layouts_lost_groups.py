"""Groups that are separate runs: one is killed at each stage of a synchronisation, the others never stop, and no sample counts twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from support import warm
from support.ranks import wait_for
from support.training import run_config, write_corpus

from flashckpt.sampler import ElasticSampler
from flashckpt.storage.posix import PosixStore
from flashckpt.trainer.config import RunConfig, to_toml
from flashckpt.trainer.data.mixed import open_data
from flashckpt.trainer.separate_runs.roster import Roster, Synchronisations
from flashckpt.trainer.train import loop

GROUPS, EVERY, STEPS, SAMPLES = 3, 4, 24, 4
WAITS_AT, VICTIM = 12, 2
"""Before the step behind this the others wait for the group that was killed: else the run ends before it has started again."""

PROGRAM = """
import hashlib, json, os, sys, time
from pathlib import Path
from flashckpt import faults
from flashckpt.trainer.config import read_config
from flashckpt.trainer.parallel.apply import local_tensor
from flashckpt.trainer.parallel.groups import run_of_group
from flashckpt.trainer.train import loop

folder, group, point, waits_at = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
config = run_of_group(read_config(folder / "run.toml", ["--parallel.group", str(group)]))
rank, log = os.environ.get("RANK", "0"), folder / f"steps{group}.{os.environ.get('RANK', '0')}"
if point and not point.startswith("step:") and not Path(f"{log}.died").exists():
    Path(f"{log}.died").touch()
    faults.arm(point)
plain = loop.Trainer.one_step

def one_step(self):
    if self.done == waits_at:
        end = time.monotonic() + 120
        while not (folder / "back").exists() and time.monotonic() < end:
            time.sleep(0.01)
    step = self.done + 1
    if point == f"step:{step}" and os.environ.get("DIES"):
        os.kill(os.getpid(), 9)
    with log.open("a") as file:
        file.write(json.dumps({"step": step, "ids": self.data.global_ids()}) + "\\n")
    record = plain(self)
    whole = hashlib.sha256()
    for parameter in self.parallel.parameters():
        whole.update(local_tensor(parameter.detach()).numpy().tobytes())
    line = {"step": step, "loss": record.loss, "weights": whole.hexdigest()}
    with log.open("a") as file:
        file.write(json.dumps(line) + "\\n")
    return record

loop.Trainer.one_step = one_step
sys.exit(loop.train(config))
"""


@pytest.fixture(scope="module")
def text(tmp_path_factory: Any) -> Any:
    folder = tmp_path_factory.mktemp("lost")
    return write_corpus(folder / "text")


@pytest.fixture(autouse=True)
def _memory(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHCKPT_SHM_DIR", str(tmp_path / "shm"))


class Run:
    """One run of several groups in a folder."""

    def __init__(self, folder: Path, text: Any, groups: int = GROUPS, patience_s: float = 3.0) -> None:
        self.folder, self.groups = folder, groups
        self.config = run_config(
            folder,
            model={"layers": 2},
            parallel={"sync_every": EVERY, "groups": groups, "sync_wait_s": patience_s, "sync_address": "127.0.0.1"},
            train={"steps": STEPS, "global_batch": SAMPLES * groups, "micro_batch": 4},
            optim={"schedule": "constant", "warmup_steps": 0, "lr": 1e-2},
            data={"source": text},
            checkpoint={"root": str(folder / "root"), "job": folder.name, "snapshot_every": 2, "persist_every": 8},
        )
        loop.prepare(replace(self.config, parallel=replace(self.config.parallel, groups=0, sync_every=0)), 1)
        (folder / "run.toml").write_text(to_toml(self.config))
        (folder / "program.py").write_text(PROGRAM)
        self.programs: list[Any] = []

    def start(self, group: int, point: str = "", *, waits: bool = False, dies: bool = True, ranks: int = 1) -> Any:
        """Start a group; it is killed at `point`, and waits in the middle for one that was killed."""
        launcher = ["-m", "flashckpt.daemon.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        words = [*launcher, "program.py", str(self.folder), str(group), point, str(WAITS_AT if waits else -1)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.folder), "DIES": "1" if dies else ""}
        log = self.folder / f"log{group}.{len(self.programs)}"
        self.programs.append(warm.start(words, log, cwd=self.folder, env=env))
        return self.programs[-1]

    def ended(self, program: Any) -> int:
        """Return the exit code of a group."""
        try:
            return int(program.wait(200.0))
        except subprocess.TimeoutExpired:
            logs = "\n".join(path.read_text() for path in sorted(self.folder.glob("log*")))
            raise AssertionError(f"a group still runs:\n{logs}") from None

    def says(self, group: int, words: str) -> bool:
        """Return whether a group has logged some words."""
        return any(words in path.read_text() for path in self.folder.glob(f"log{group}.*"))

    def rosters(self) -> list[Roster]:
        """Return the rosters of all synchronisations that took place, in their order."""
        found = Synchronisations(PosixStore(self.folder / "root" / "synchronisations"), self.groups, 0.0)
        return [roster for number in range(found.newest() + 1) if (roster := found.roster(number)) is not None]

    def has_come(self, group: int) -> bool:
        """Return whether a group is there for the synchronisation behind the newest."""
        number = self.rosters()[-1].number + 1
        return any(self.folder.glob(f"root/synchronisations/{number:07d}.*/here.{group}"))

    def steps(self, group: int, rank: int = 0) -> dict[int, dict[str, Any]]:
        """Return what a group trained, by step; of a step that was trained twice the last."""
        found: dict[int, dict[str, Any]] = {}
        for line in map(json.loads, (self.folder / f"steps{group}.{rank}").read_text().splitlines()):
            found[line["step"]] = {**found.get(line["step"], {}), **line}
        return found


@pytest.fixture
def make(tmp_path: Path, text: Any) -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def run(**more: Any) -> Run:
        folder = tmp_path / f"run{len(made)}"
        folder.mkdir()
        made.append(Run(folder, text, **more))
        return made[-1]

    yield run
    for one in made:
        for program in one.programs:
            program.kill()


def shares(config: RunConfig, count: int) -> list[list[int]]:
    """Return the samples of the first shares of the stream, each `EVERY` batches of a group."""
    data = open_data(config, "train")
    sampler = ElasticSampler(data.samples, dp_rank=0, dp_size=1, seed=config.train.seed, global_batch_size=SAMPLES)
    found = []
    for _ in range(count):
        share: list[int] = []
        for _ in range(EVERY):
            share += map(int, sampler.next_ids())
            sampler.commit()
        found.append(share)
    return found


def check_counted_once(run: Run) -> None:
    """The training that is in the result is of shares that no other trained; each was trained as the stream has it."""
    rosters, counted = run.rosters(), []
    wanted = shares(run.config, rosters[-1].unused)
    for roster in rosters[1:]:
        before = rosters[roster.base]
        for group in roster.gave:
            counted.append(before.share_of(group))
            steps = range(before.step + 1, before.step + EVERY + 1)
            trained = [one for step in steps for one in run.steps(group)[step]["ids"]]
            assert trained == wanted[counted[-1]], (roster.number, group)
    assert len(counted) == len({*counted}), "no share counts twice"
    last = rosters[-1]
    assert {*counted} | {*last.owed} | {*last.shares} == {*range(last.unused)}, "none is forgotten"


def losses(run: Run) -> list[float]:
    """Return the loss of each step, the mean of all groups: what one trains is other samples in another run."""
    steps = [run.steps(group) for group in range(GROUPS)]
    return [fmean(one[step]["loss"] for one in steps if "loss" in one.get(step, {})) for step in range(1, STEPS + 1)]


def check_equal(run: Run, groups: Any) -> None:
    """All have the same weights behind the last synchronisation."""
    assert len({run.steps(group)[STEPS]["weights"] for group in groups}) == 1


@pytest.fixture(scope="module")
def unbroken() -> dict[str, list[float]]:
    return {}


def unbroken_losses(make: Callable[..., Run], kept: dict[str, list[float]]) -> list[float]:
    if not kept:
        run = make()
        assert [run.ended(one) for one in [run.start(group) for group in range(GROUPS)]] == [0] * GROUPS
        check_equal(run, range(GROUPS))
        check_counted_once(run)
        assert all(roster.gave == roster.groups == (0, 1, 2) for roster in run.rosters())
        assert [roster.step for roster in run.rosters()] == [*range(0, STEPS + 1, EVERY)]
        kept["losses"] = losses(run)
    return kept["losses"]


@pytest.mark.parametrize(
    "point",
    [
        f"step:{EVERY + 2}",
        "groups.before-here:2",
        "groups.after-roster",
        "groups.during-exchange:2",
        "groups.before-outcome:2",
        "groups.after-outcome:2",
    ],
)
def test_group_killed_at_a_synchronisation_others_continue_and_take_it_in_again(
    point: str, make: Callable[..., Run], unbroken: dict[str, list[float]]
) -> None:
    wanted = unbroken_losses(make, unbroken)
    run = make()
    others = [run.start(group, waits=True) for group in range(GROUPS) if group != VICTIM]
    if point == "groups.after-roster":  # who comes last decides, if no other looks meanwhile
        wait_for(
            lambda: len([*run.folder.glob("root/synchronisations/0000001.0/here.*")]) == 2,
            what="the others",
            deadline_s=100,
        )
        for one in others:
            one.send_signal(signal.SIGSTOP)
    assert run.ended(run.start(VICTIM, point)) == -signal.SIGKILL
    for one in others:
        one.send_signal(signal.SIGCONT)
    wait_for(lambda: any(VICTIM not in one.groups for one in run.rosters()), what="a roster without it", deadline_s=100)
    again = run.start(VICTIM, dies=False)
    wait_for(lambda: run.says(VICTIM, "waits for them"), what="it to be back", deadline_s=100)
    wait_for(lambda: run.has_come(VICTIM), what="it to come to the next synchronisation", deadline_s=100)
    (run.folder / "back").touch()
    assert [run.ended(one) for one in [*others, again]] == [0] * GROUPS
    check_equal(run, range(GROUPS))
    check_counted_once(run)
    gave = [roster.gave for roster in run.rosters()]
    assert (0, 1) in gave
    assert gave[-1] == (0, 1, 2), "it trains with them again"
    assert [*run.steps(0)] == [*range(1, STEPS + 1)], "the others trained each step"
    found = losses(run)
    assert abs(fmean(found[-4:]) - fmean(wanted[-4:])) < 0.3, (found[-4:], wanted[-4:])
    assert sum(found[-4:]) < sum(found[:4]) - 4


def test_group_of_two_ranks_of_which_one_is_killed_in_the_exchange_is_back_in_time(make: Callable[..., Run]) -> None:
    run = make(groups=2, patience_s=100.0)
    programs = [run.start(0, ranks=2), run.start(1, "groups.during-exchange:2:rank1", ranks=2)]
    assert [run.ended(one) for one in programs] == [0, 0]
    assert all(roster.gave == roster.groups == (0, 1) for roster in run.rosters())
    check_counted_once(run)
    for rank in range(2):
        assert len({run.steps(group, rank)[STEPS]["weights"] for group in range(2)}) == 1
    assert (run.folder / "steps1.1.died").exists()
    assert len([*run.folder.glob("root/synchronisations/0000002.*")]) > 1, "tried again"
