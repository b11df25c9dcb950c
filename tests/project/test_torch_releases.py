"""What differs between the releases of torch that are supported; tests/integration/torch_versions/versions.py runs the suite under each of them."""

from __future__ import annotations

import re
from argparse import ArgumentParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support.dlrun import dlrun
from support.paths import ROOT
from torch import Tensor, nn

from flashckpt.daemon.launcher import cli
from flashckpt.daemon.launcher.options import LaunchOutcome
from flashckpt.trainer.parallel.apply import Parallel
from flashckpt.trainer.train.step import TrainStep

AT_EXIT = """
import atexit, gc
atexit.register(lambda: print("frozen", gc.get_freeze_count(), flush=True))
"""


def test_worker_ends_without_objects_that_the_collector_may_not_touch(tmp_path: Path) -> None:
    """What stays frozen is alive when the interpreter has ended: nanobind modules (torch 2.14) print a list of it."""
    (tmp_path / "script.py").write_text(AT_EXIT)
    with dlrun(tmp_path, "--nproc-per-node", 1, tmp_path / "script.py") as launch:
        assert launch.wait() == 0
    assert re.findall(r"frozen (\d+)", launch.output) == ["0"], launch.output


def test_torchrun_without_shutdown_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 has no such option; the variable of the same meaning is dlrun's own to read."""
    from torch.distributed import run as torchrun

    from flashckpt.daemon.launcher import launch as launcher

    given: dict[str, Any] = {}
    original = torchrun.config_from_args

    def config_from_args(args: Any) -> Any:
        args.shutdown_timeout = None
        config = original(args)
        del args.shutdown_timeout
        return config

    def launch(*_: Any, options: Any, **__: Any) -> LaunchOutcome:
        given["survivors_s"] = options.survivors_s
        return LaunchOutcome()

    monkeypatch.setattr(torchrun, "config_from_args", config_from_args)
    monkeypatch.setattr(launcher, "launch", launch)
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "7")
    parser: ArgumentParser = cli.get_args_parser()
    cli.run(parser.parse_args(["--no-zygote", "--log-dir", str(tmp_path), "script.py"]))
    assert given == {"survivors_s": 7.0}


class Schedule:
    """A pipeline schedule of one stage; before its first step it runs the stage on zeros, as torch 2.11 does."""

    def __init__(self, stage: nn.Module) -> None:
        self.stage, self.trials, self.outputs = stage, 1, list[Tensor]()

    def step(self, tokens: Tensor, **_: Any) -> None:
        if self.trials:
            self.trials -= 1
            with torch.no_grad():
                self.stage(torch.zeros_like(tokens))
        self.outputs.append(self.stage(tokens))


def test_dropout_is_that_of_a_run_whose_pipeline_was_not_tried_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed process tries its pipeline once more, which in torch 2.11 moves the generators."""
    stage = nn.Dropout(0.5)
    schedule = Schedule(stage)
    parallel = SimpleNamespace(
        parts=[stage], device=torch.device("cpu"), layout=SimpleNamespace(pp=2, micro_batches=1),
        has_first=True, has_last=True, context=None, parameters=list, schedule=lambda _: schedule,
    )  # fmt: skip
    step = TrainStep(cast("Parallel", parallel), [])
    monkeypatch.setattr("flashckpt.trainer.train.step.settle_gradients", lambda _: None)
    monkeypatch.setattr("flashckpt.trainer.train.step.local_square_sum", lambda _: torch.zeros(()))
    monkeypatch.setattr(step, "_reduce", lambda _: None)
    batch: Any = SimpleNamespace(tokens=torch.ones(64), targets=torch.ones(64), documents=None)
    torch.manual_seed(3)
    wanted = [stage(batch.tokens) for _ in range(2)]
    torch.manual_seed(3)
    for _ in wanted:
        step.backward(batch)
    assert schedule.trials == 0
    assert [output.tolist() for output in schedule.outputs] == [output.tolist() for output in wanted]
    assert not torch.equal(wanted[0], wanted[1])
    with torch.no_grad():  # behind the first step a forward without gradients (an evaluation) draws as ever
        state = torch.get_rng_state()
        stage(batch.tokens)
    assert not torch.equal(torch.get_rng_state(), state)


RAN = r"\d\.\d+ \| identical" + r" \| \d+ passed" * 3 + r" \| 0 \|"


def test_oldest_release_of_the_package_is_in_the_table() -> None:
    """pyproject.toml asks for what docs/versions.md shows to work, no more; every row is that of a whole run without a failure."""
    (oldest,) = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    page = (ROOT / "docs" / "versions.md").read_text()
    rows = re.findall(r"^\| (\d+\.\d+)\.\S* \| (.*)$", page, re.MULTILINE)
    assert rows[0][0] == oldest
    assert [row for row in rows if not re.fullmatch(RAN, row[1])] == []
