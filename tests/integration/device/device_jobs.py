"""Jobs on the emulated device that are killed and go on: in a step, in a copy, in a restore, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support import emulated_device, warm
from support.agents import pretend_agent
from support.paths import ROOT

from integration.device.job import STEPS
from integration.device.nets import MODULES, OPTIMIZERS

pytestmark = [
    pytest.mark.skipif(bool(emulated_device.why_not()), reason=emulated_device.why_not()),
    pytest.mark.timeout(400),
]
DEADLINE_S = 180.0


@dataclass(frozen=True)
class Case:
    """What trains, and how."""

    name: str
    nets: tuple[str, ...] = ("adamw/mlp/float32",)
    kind: str = "plain"
    staged: bool = False

    @property
    def ranks(self) -> int:
        return 1 if self.kind == "plain" else 2

    @property
    def words(self) -> list[str]:
        return ["--nets", ",".join(self.nets), "--kind", self.kind] + ["--staged"] * self.staged


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Jobs:
    """Runs ranks in one folder, as an agent would."""

    def __init__(self, folder: Path, shm_dir: Path) -> None:
        folder.mkdir()
        self.folder, self.agent, self.job, self.shm = folder, pretend_agent(folder), folder.name, shm_dir

    def run(self, case: Case, *more: str, die: str = "", life: int = 0, seed: int = 1) -> list[int]:
        """Return the exit codes of the ranks of one life."""
        port, running = free_port(), []
        for rank in range(case.ranks):
            where = {
                "RANK": rank, "WORLD_SIZE": case.ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": case.ranks,
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            }  # fmt: skip
            environment = {**os.environ, "FLASHCKPT_AGENT_DIR": self.agent, "FLASHCKPT_SHM_DIR": str(self.shm)}
            environment |= {name: str(value) for name, value in where.items()} if case.kind != "plain" else {}
            words = ["-m", "integration.device.job", str(self.folder), *case.words, *more, "--die", die]
            words += ["--life", str(life), "--seed", str(seed), "--job", self.job]
            log = self.folder / f"log{life}-{rank}"
            running.append(warm.start(words, log, cwd=ROOT / "tests", env=environment))
        first = running[0].wait(DEADLINE_S)
        if die:  # an agent would kill the others
            for process in running[1:]:
                process.kill()
        return [first, *(process.wait(DEADLINE_S) for process in running[1:])]

    def log(self, life: int) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob(f"log{life}-*")))

    def ends(self, case: Case, what: str = "nets") -> list[Any]:
        return [json.loads((self.folder / f"end{rank}").read_text())[what] for rank in range(case.ranks)]

    def losses(self, case: Case) -> list[dict[int, set[str]]]:
        """Return of each rank the losses of each step, of which there is one where every life computed the same."""
        found: list[dict[int, set[str]]] = []
        for rank in range(case.ranks):
            steps: dict[int, set[str]] = {}
            for line in (self.folder / f"trace{rank}").read_text().splitlines():
                _, step, losses = line.split(" ", 2)
                steps.setdefault(int(step), set()).add(losses)
            found.append(steps)
        return found


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case, Path], Jobs]:
    """Returns the unbroken run of a case, made once."""
    made: dict[Case, Jobs] = {}

    def run(case: Case, shm_dir: Path) -> Jobs:
        if case not in made:
            jobs = Jobs(tmp_path_factory.mktemp("unbroken") / case.name, shm_dir)
            assert jobs.run(case) == [0] * case.ranks, jobs.log(0)
            assert jobs.ends(case, "failures") == [[]] * case.ranks
            made[case] = jobs
        return made[case]

    return run


DEATHS = {"step": ["step"], "copy": ["copy"], "restore": ["step", "restore"]}
"""Of each place, what the lives before the last one die of."""
WAYS = [Case("locked"), Case("staged", staged=True), Case("ddp", kind="ddp"), Case("fsdp", kind="fsdp")]
MATRIX = [
    (Case("optimizers", tuple(f"{name}/mlp/float32" for name in OPTIMIZERS)), "copy"),
    (Case("optimizers-staged", tuple(f"{name}/mlp/float32" for name in OPTIMIZERS), staged=True), "step"),
    (Case("modules", tuple(f"adamw/{name}/float32" for name in MODULES)), "restore"),
    (Case("modules-staged", tuple(f"adamw/{name}/float32" for name in MODULES), staged=True), "copy"),
    (Case("dtypes", ("adamw/mlp/bfloat16", "adamw/mlp/float64", "sgd/mlp/float16")), "copy"),
    (Case("ddp-others", ("amsgrad/attention/float32", "sgd/convolution/float32"), "ddp", staged=True), "copy"),
    (Case("fsdp-others", ("foreach/attention/float32", "sgd/mlp/bfloat16"), "fsdp", staged=True), "copy"),
]
CASES = [(case, death) for case in WAYS for death in DEATHS] + MATRIX


@pytest.mark.parametrize(("case", "death"), CASES, ids=lambda value: value if isinstance(value, str) else value.name)
def test_a_job_that_is_killed_goes_on_bit_for_bit(
    case: Case, death: str, unbroken: Callable[[Case, Path], Jobs], tmp_path: Path, shm_dir: Path
) -> None:
    wanted, killed = unbroken(case, shm_dir), Jobs(tmp_path / "killed", shm_dir)
    lives = DEATHS[death]
    for life, die in enumerate(lives):
        assert killed.run(case, die=die, life=life, seed=2 + life)[0] == -signal.SIGKILL, killed.log(life)
    last = len(lives)
    assert killed.run(case, life=last, seed=9) == [0] * case.ranks, killed.log(last)
    assert set(killed.ends(case, "first")) <= {3, 4}, "it went on from memory, behind the newest snapshot"
    assert killed.ends(case) == wanted.ends(case)
    assert killed.losses(case) == wanted.losses(case)
    assert all(len(values) == 1 and len(steps) == STEPS for steps in killed.losses(case) for values in steps.values())
