"""`make test-device`: a rank that is killed under `dlrun --standby 1` goes on in a process whose context is there already."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from support import emulated_device, emulated_dlrun
from support.dlrun import ENGINE, Launch, dlrun, first_steps, traces

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(emulated_device.why_not()), reason=emulated_device.why_not()),
]
STEPS = 30
PROGRAM = (
    ENGINE.replace("Linear(4, 4)", 'Linear(4, 4).to("emu")')
    .replace("float(step % 7))", 'float(step % 7), device="emu")')
    .replace("        dist.all_reduce(parameter.grad, op=dist.ReduceOp.MAX)", "        pass")
    .replace("rank, life =", "had_context = torch.emu.is_initialized()\nrank, life =")
    .replace('write(f"{os.getpid()} ', 'write(f"{os.getpid()} ')
    .replace(
        "    if ckpt.should_stop:",
        '    open(f"{folder}/context{life}", "w").write(str(had_context))\n    if ckpt.should_stop:',
    )
    .replace(
        "time.sleep(pause)", 'while step >= 10 and not os.path.exists(f"{folder}/finish"):\n        time.sleep(pause)'
    )
)


@contextmanager
def launched(folder: Path, *flags: str) -> Iterator[Launch]:
    (folder / "train.py").write_text(PROGRAM)
    words = ("--nproc-per-node=1", "--hang-timeout=0", *flags, folder / "train.py", folder, STEPS, 0.02)
    environment = {"EMULATED_CONTEXT_MS": "3000", "FLASHCKPT_LOGLEVEL": "DEBUG"}
    with dlrun(folder, *words, env=environment, program=emulated_dlrun.__file__) as launch:
        yield launch


def test_a_rank_from_standby_has_its_context_and_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    unbroken.mkdir()
    broken.mkdir()
    (unbroken / "finish").touch()
    with launched(unbroken) as launch:
        assert launch.wait() == 0, launch.output
    with launched(broken, "--standby=1") as launch:
        pids = launch.until(partial(first_steps, broken, 0, 1), "the first step")
        launch.until(lambda: re.search(r"standby processes are ready: 1", launch.output), "the standby")
        os.kill(pids[0], signal.SIGKILL)
        launch.until(partial(first_steps, broken, 1, 1), "the next step")
        (broken / "finish").touch()
        assert launch.wait() == 0, launch.output
    assert "took 1 of 1 ranks from standby" in launch.output
    assert [(broken / f"context{life}").read_text() for life in range(2)] == ["False", "True"]
    assert traces(broken, 1) == traces(unbroken, 1)
