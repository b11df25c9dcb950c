"""Programs that call torch's launcher as an API: they get dlrun's agent, its restarts, and an exit code that says a stop."""

from __future__ import annotations

import ast
import os
import signal
from pathlib import Path

import pytest
from support.dlrun import ENGINE, TRAIN, dlrun, first_steps, traces

from flashckpt.errors import RESUME_EXIT_CODE

pytestmark = pytest.mark.timeout(300)
STAND_IN = "flashckpt.daemon.stand_in"
CALLER = """
import sys
import torch.distributed.run as distrib_run

args = distrib_run.get_args_parser().parse_args(sys.argv[1:])
distrib_run.run(args)
print("the caller goes on")
"""
FUNCTION = """
import os, signal, sys
import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def train(folder, steps):
    import torch.distributed as dist
    from flashckpt import Checkpointer

    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
    optimizer = torch.optim.AdamW(model.parameters())
    ckpt = Checkpointer(f"{folder}/root", snapshot_every=2, persist_every=50)
    ckpt.track(model=torch.nn.parallel.DistributedDataParallel(model), optimizer=optimizer, rng=True)
    report = ckpt.restore()
    first = report.step if report else 0
    for step in range(first + 1, steps + 1):
        optimizer.zero_grad()
        loss = model(torch.full((2, 4), float(step))).square().sum()
        loss.backward()
        optimizer.step()
        if step == 9 and dist.get_rank() == 1 and os.path.exists(f"{folder}/kill"):
            os.remove(f"{folder}/kill")
            os.kill(os.getpid(), signal.SIGKILL)
        ckpt.step(step)
    ckpt.wait()
    ckpt.close()
    dist.destroy_process_group()
    return first, loss.item().hex(), os.environ["FLASHCKPT_RESTART"]


if __name__ == "__main__":
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, run_id="job", rdzv_backend="c10d", rdzv_endpoint="localhost:0"
    )
    print("returned", elastic_launch(config, train)(sys.argv[1], 14))
"""


def caller(folder: Path, text: str) -> Path:
    path = folder / "caller.py"
    path.write_text(text)
    return path


def test_a_caller_of_torchruns_run_gets_the_restarts_of_dlrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    words = ("--nproc-per-node=2", "--max-restarts=2", script, tmp_path, 40, 0.01)
    with dlrun(tmp_path, caller(tmp_path, CALLER), *words, module=STAND_IN) as launch:
        pids = launch.until(lambda: first_steps(tmp_path, 0, 2), "the first steps")
        os.kill(pids[1], signal.SIGKILL)
        launch.until(lambda: first_steps(tmp_path, 1, 2), "the steps of the restart")
        (tmp_path / "finish").touch()
        assert launch.wait() == 0, launch.output
        assert launch.says("the caller goes on")
        assert launch.says("[dlrun]")


def test_a_stop_on_request_ends_the_caller_with_the_code_of_a_stop(tmp_path: Path) -> None:
    """One that went on would report the job as done."""
    script = tmp_path / "train.py"
    script.write_text(ENGINE)
    words = ("--nproc-per-node=2", "--max-restarts=2", script, tmp_path, 5000, 0.01)
    with dlrun(tmp_path, caller(tmp_path, CALLER), *words, module=STAND_IN) as launch:
        launch.until(lambda: first_steps(tmp_path, 0, 2), "the first steps")
        launch.process.send_signal(signal.SIGTERM)
        assert launch.wait() == RESUME_EXIT_CODE, launch.output
        assert not launch.says("the caller goes on")
    assert max(traces(tmp_path, 2)[0]) == max(traces(tmp_path, 2)[1])


def test_a_function_of_elastic_launch_is_restarted_exactly_and_its_results_come_back(tmp_path: Path) -> None:
    found = []
    for name in ("unbroken", "killed"):
        folder = tmp_path / name
        folder.mkdir()
        if name == "killed":
            (folder / "kill").touch()
        program = caller(folder, FUNCTION)
        with dlrun(folder, program, folder, module=STAND_IN) as launch:
            assert launch.wait() == 0, launch.output
            (line,) = [line for line in launch.output.splitlines() if line.startswith("returned ")]
        found.append(ast.literal_eval(line.removeprefix("returned ")))
    (unbroken, killed) = found
    assert {rank: (one[0], one[2]) for rank, one in unbroken.items()} == {0: (0, "0"), 1: (0, "0")}
    assert {one[2] for one in killed.values()} == {"1"}
    assert {one[0] for one in killed.values()} <= {6, 8}
    assert {rank: one[1] for rank, one in killed.items()} == {rank: one[1] for rank, one in unbroken.items()}


def test_a_program_that_is_not_there_is_said(tmp_path: Path) -> None:
    with dlrun(tmp_path, "no-such-program", module=STAND_IN) as launch:
        assert launch.wait() == 2
        assert launch.says("there is no program 'no-such-program'")
