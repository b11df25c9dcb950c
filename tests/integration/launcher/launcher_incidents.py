"""One report per incident (make test-launcher): faults of jobs on one node, each with its verdict in the output and on the root."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from support import incidents
from support.dlrun import dlrun
from support.faulty_ranks import FAULTS, check, struck_pid, write_program

from flashckpt.cli import main as cli
from flashckpt.core.incident import Incident
from flashckpt.errors import RESUME_EXIT_CODE
from flashckpt.shm.job_directory import memory_root

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_has_one_verdict_in_the_output_in_memory_and_on_the_root(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = FAULTS[name]
    settings = write_program(fault, tmp_path)
    flags = ("--nproc-per-node=3", "--hang-timeout=3", tmp_path / "train.py", tmp_path)
    told = tmp_path / "told"
    settings |= {"FLASHCKPT_HOOK": f"sh -c 'cat >> {told}'"}
    with dlrun(tmp_path, *flags, env=settings) as launch:
        if fault.strike is not None:
            fault.strike(launch.until(lambda: struck_pid(tmp_path), "it"), tmp_path)
        launch.until((tmp_path / "again").exists, "the next generation")
        (found,) = incidents.in_memory(memory_root().parent)
        capsys.readouterr()
        with pytest.raises(SystemExit):
            cli.main(["status", "--json"])
        (job,) = json.loads(capsys.readouterr().out)["jobs"]
        assert [one["verdict"] for one in job["incidents"]] == [found.verdict]
        launch.until(lambda: incidents.on_root(tmp_path / "root"), "the incident on the root")
        launch.process.send_signal(signal.SIGTERM)
        assert launch.wait() == RESUME_EXIT_CODE, launch.output
    check(fault, found, launch.output)
    assert incidents.on_root(tmp_path / "root") == [found]
    assert [one["event"] for one in hooked(told) if one["incident"].get("verdict") == found.verdict] == ["incident"]


def hooked(told: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in told.read_text().splitlines()]


def test_before_the_first_step_and_where_the_job_ends_there_is_a_verdict_too(tmp_path: Path) -> None:
    """A program without a Checkpointer: there is no job directory to write into."""
    (tmp_path / "train.py").write_text("import os\nif os.environ['RANK'] == '1': import flash_attn_that_is_not_there")
    with dlrun(tmp_path, "--nproc-per-node=2", "--max-restarts=0", tmp_path / "train.py") as launch:
        assert launch.wait() == 1
    (line,) = incidents.said(launch.output)
    assert re.match(r"script: rank 1 \(pid \d+\) on \S+ before its first step: .*ModuleNotFoundError.* -> stop", line)
    assert "-> stop: not restarting: --max-restarts is 0" in launch.output


STRAGGLER = """
import os, sys, time, torch, torch.distributed as dist
from flashckpt import Checkpointer

folder, phase, rank = sys.argv[1], sys.argv[2], int(os.environ["RANK"])
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.AdamW(model.parameters())
ckpt = Checkpointer(folder + "/root", snapshot_every=10)
ckpt.track(model=model, optimizer=optimizer, replicated_over="world")
ckpt.restore()
step = 0
while not ckpt.should_stop:
    step += 1
    begun = time.perf_counter()
    is_slow = rank == 1 and not os.path.exists(f"{folder}/fast")
    if phase == "data":
        time.sleep(0.05 if is_slow else 0.005)
        ckpt.phases(data=time.perf_counter() - begun)
    else:
        while time.perf_counter() - begun < (0.05 if is_slow else 0.005):
            pass
    dist.all_reduce(torch.ones(1))
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    ckpt.step(step)
ckpt.close()
"""
QUICK = """
import sys
from flashckpt.daemon.launcher import slowness, stragglers
from flashckpt.daemon.run import main
stragglers.LOOK_S, slowness.NAMED_S = 0.5, 2.0
if __name__ == "__main__":
    sys.exit(main())
"""


@pytest.mark.parametrize("phase", ["data", "processor"])
def test_slow_rank_is_named_with_its_phase_while_it_trains_and_again_when_it_recovers(
    phase: str, tmp_path: Path
) -> None:
    """What a loop tells of its phases, and what the kernel knows of one that tells nothing. Looks are closer here than 10 s."""
    (tmp_path / "train.py").write_text(STRAGGLER)
    (tmp_path / "quick.py").write_text(QUICK)
    args = ("--nproc-per-node=3", tmp_path / "train.py", tmp_path, phase)

    def its_own() -> list[Incident]:  # a machine with other work may slow down others too
        return [one for one in incidents.in_memory(memory_root().parent) if one.rank == 1]

    with dlrun(tmp_path, *args, program=str(tmp_path / "quick.py")) as launch:
        (slow,) = launch.until(its_own, "its name")
        (tmp_path / "fast").touch()
        launch.until(lambda: len(its_own()) == 2, "its recovery")
        launch.process.send_signal(signal.SIGTERM)
        assert launch.wait() == RESUME_EXIT_CODE, launch.output
    assert (slow.kind, slow.rank, slow.action) == ("straggler", 1, "continue")
    kind = "data" if phase == "data" else "unknown"
    first, second = (one for one in incidents.said(launch.output) if ": rank 1 " in one)
    assert re.fullmatch(
        rf"{kind}: rank 1 \(pid \d+\) on \S+ at step \d+: slow in {phase} for \d+ s: 0\.0[4-9]\d* s of each step, the median of the "
        r"ranks is 0\.0[0-3]\S* s -> continue", first
    ), first  # fmt: skip
    assert re.search(r"rank 1 .* is as fast as the others again, after \d+ s -> continue", second), second
