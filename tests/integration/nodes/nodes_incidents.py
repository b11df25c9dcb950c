"""One report per incident over several nodes (make test-nodes; root): dead links, wrong environments, a full root.

Killed and stopped ranks, dead machines and the OOM killer are in nodes.py, beside what dlrun does about them.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest
from support import incidents
from support.browser import CHROMIUM, browser, dashboard
from support.dlrun import ENGINE, dlrun, first_steps
from support.faulty_ranks import FAULTS, check, struck_pid, write_program
from support.nodes import Nodes, nodes

from flashckpt.core.incident import CONTINUE, RESTART, RESTART_WITHOUT, Incident
from flashckpt.daemon.launcher.options import NodeCheckError
from flashckpt.errors import RESUME_EXIT_CODE
from flashckpt.shm.job_directory import memory_root

pytestmark = [pytest.mark.timeout(600), pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")]


def reported(them: Nodes, node: int) -> list[Incident]:
    return incidents.in_memory(them.memory(node))


def test_dead_link_the_node_is_named_with_the_seconds_since_its_last_sign(tmp_path: Path) -> None:
    """It runs on behind the link, and nobody's connection closes: its heartbeat is what is missing."""
    (tmp_path / "train.py").write_text(ENGINE.replace("life{life}", "life{os.environ['WORLD_SIZE']}"))
    with nodes(tmp_path, 3) as them:
        for node in range(3):
            flags = ("--nproc-per-node=1", "--hang-timeout=3", tmp_path / "train.py", tmp_path, 100000, 0.05)
            them.start(node, *flags, nnodes="2:3")
        them.until(lambda: first_steps(tmp_path, 3, 3), "3 ranks")
        them.link(2, up=False)
        (found,) = them.until(partial(reported, them, 0), "the report")
        assert reported(them, 1) == []
        log = them.log(0)
    assert re.fullmatch(
        rf"network: node 2 \({them.prefix}2\): stopped answering with rank 2, last sign \d+\.\d s ago; it cannot be reached: "
        "its link or the machine is down -> restart without that node",
        found.verdict,
    ), found.verdict
    assert (found.kind, found.action, found.lost[0]["host"]) == ("node lost", RESTART_WITHOUT, f"{them.prefix}2")
    assert 1.0 < found.silent_s < 60.0
    assert incidents.said(log) == [found.verdict]
    assert "the other ranks: 2 in " in log


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_node_that_is_lost_is_seen_on_the_open_page(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ENGINE.replace("life{life}", "life{os.environ['WORLD_SIZE']}"))
    with nodes(tmp_path, 3) as them, browser(tmp_path / "profile") as page:
        for node in range(3):
            them.start(node, "--nproc-per-node=1", tmp_path / "train.py", tmp_path, 100000, 0.05, nnodes="2:3")
        them.until(lambda: first_steps(tmp_path, 3, 3), "3 ranks")
        them.until(lambda: list((tmp_path / "root" / "history").glob("0*")), "the session on the root")
        with dashboard(tmp_path / "root", env={"FLASHCKPT_SHM_DIR": str(them.memory(0))}) as address:
            page.open(address)
            page.until("document.getElementById('state').innerText === 'running, generation 1'")
            page.value("window.stays = 1")
            them.kill(2)
            page.until("document.getElementById('incidents').innerText.includes('stopped answering with rank 2')", 120)
            page.until("document.getElementById('state').innerText === 'running, generation 2'", 120)
            page.until("[...document.querySelectorAll('#sessions tr')][1].children[3].innerText === '2'")
            assert page.value("window.stays") == 1, "it was not loaded again"
        (found,) = reported(them, 0)
        assert found.host == f"{them.prefix}2"


def test_wrong_environment_on_one_node_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "only_there.py").touch()
    (tmp_path / "train.py").write_text("import only_there\n" + ENGINE)
    with nodes(tmp_path, 2) as them:
        for node in range(2):
            env = {"PYTHONPATH": str(tmp_path / "modules")} if node == 0 else {}
            flags = ("--nproc-per-node=2", "--max-restarts=1", tmp_path / "train.py", tmp_path, 100000, 0.05)
            them.start(node, *flags, nnodes="2", env=env)
        them.until(lambda: incidents.said(them.log(0)), "the report")
        line = incidents.said(them.log(0))[0]
        log = them.log(0)
        assert incidents.said(them.log(1)) == []
    assert re.match(
        rf"machine: rank [23] \(pid \d+\) on {them.prefix}1 before its first step: .*No module named 'only_there'", line
    ), line
    assert f"also: the environment of {them.prefix}1 differs: PYTHONPATH not set, elsewhere {tmp_path}/modules" in log
    assert re.search(r"the other ranks: .*2 in init_process_group \(rank 0-1\)", log), log


def test_full_root_is_an_incident_while_training_continues(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "train.py").write_text(ENGINE.replace("persist_every=50", "persist_every=10"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(root)], check=True)
    try:
        with dlrun(tmp_path, "--nproc-per-node=2", tmp_path / "train.py", tmp_path, 100000, 0.02) as launch:
            launch.until(lambda: list(root.glob("step-*/MANIFEST")), "a checkpoint")
            fill(root / "filler")
            (found,) = launch.until(lambda: incidents.in_memory(memory_root().parent), "the report")
            assert (found.kind, found.category, found.action) == ("persister", "storage", CONTINUE)
            assert "No space left on device" in found.what
            (root / "filler").unlink()
            launch.until(lambda: incidents.on_root(root) == [found], "the report on the root once there is room")
            launch.process.send_signal(signal.SIGTERM)
            assert launch.wait() == RESUME_EXIT_CODE, launch.output
    finally:
        subprocess.run(["umount", "--lazy", str(root)], check=True)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError:
            return


def test_a_rank_killed_on_another_node_is_named_with_what_all_others_did(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ENGINE.replace("life{life}", "life{life}-{os.environ['WORLD_SIZE']}"))
    with nodes(tmp_path, 2) as them:
        for node in range(2):
            them.start(node, "--nproc-per-node=2", tmp_path / "train.py", tmp_path, 100000, 0.02, nnodes="2")
        pids = them.until(lambda: first_steps(tmp_path, "0-4", 4), "4 ranks")  # type: ignore[arg-type]
        os.kill(pids[3], signal.SIGKILL)
        (found,) = them.until(partial(reported, them, 0), "the report")
        assert reported(them, 1) == []
        them.until(lambda: incidents.on_root(tmp_path / "root") == [found], "the report on the root")
    assert (found.host, found.rank, found.pid, found.category) == (f"{them.prefix}1", 3, pids[3], "unknown")
    assert (found.kind, found.node, found.action, found.unheard) == ("failure", 1, RESTART, ())
    assert found.step > 0
    assert sum(one["count"] for one in found.others) == 3


@pytest.mark.parametrize("name", [name for name in FAULTS if not name.startswith("SIG")])
def test_fault_of_a_rank_on_another_node_has_the_verdict_that_it_has_on_one(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    env = write_program(fault, tmp_path)
    with nodes(tmp_path, 3) as them:
        for node in range(3):
            flags = ("--nproc-per-node=1", f"--hang-timeout={3 if fault.kind == 'hang' else 0}")
            them.start(node, *flags, tmp_path / "train.py", tmp_path, nnodes="3", env=env)
        if fault.strike is not None:
            fault.strike(them.until(lambda: struck_pid(tmp_path), "it"), tmp_path)
        them.until((tmp_path / "again").exists, "the next generation")
        (found,) = reported(them, 0)
        assert [reported(them, node) for node in (1, 2)] == [[], []], "the first node reports"
        them.until(lambda: incidents.on_root(tmp_path / "root") == [found], "the report on the root")
        logs = [them.log(node) for node in range(3)]
    check(fault, found, logs[0], others=r"\d in ")  # some have noticed by then, others wait
    if fault.rank >= 0:
        assert (found.host, found.node) == (f"{them.prefix}1", 1)


SHARDED = """
import math, os, socket, sys, time
import torch, torch.distributed as dist
from pathlib import Path
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
from flashckpt import Checkpointer

folder, bad = Path(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(16, 16)
fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
optimizer = torch.optim.AdamW(model.parameters())
ckpt = Checkpointer(str(folder / "root"), snapshot_every=1, persist_every=5)
ckpt.track(model=model, optimizer=optimizer)
report = ckpt.restore()
step = 0 if report is None else report.step
while step < 30:
    loss = model(torch.ones(2, 16)).pow(2).mean()
    if not torch.isfinite(loss):
        raise FloatingPointError(f"the loss of step {step + 1}")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    mark = folder / f"struck-{step}"
    if step in (12, 20) and socket.gethostname() == bad and not mark.exists():
        mark.touch()
        with torch.no_grad():
            model.weight.to_local()[0, 0] = math.nan
    ckpt.step(step)
    if step % 5 == 0:
        ckpt.wait()
    (folder / f"reached-{step}").touch()
    while step == 25 and not (folder / "goes-on").exists():
        time.sleep(0.02)
        ckpt.heartbeat()
ckpt.wait()
"""


def test_machine_whose_numbers_become_bad_twice_is_named_and_a_spare_takes_its_place(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SHARDED)
    with nodes(tmp_path, 3) as them:
        words = ("--nproc-per-node=1", tmp_path / "train.py", tmp_path, f"{them.prefix}1")
        for node in (0, 1):
            them.start(node, *words, nnodes="2")
        them.until(lambda: "it stays until another node waits" in them.log(1), "its name")
        them.start(2, *words, nnodes="2")
        assert them.wait(1) == NodeCheckError.exit_code, them.log(1)
        (tmp_path / "goes-on").touch()
        assert [them.wait(node) for node in (0, 2)] == [0, 0], them.log(0) + them.log(2)
        logs = [them.log(node) for node in range(3)]
    assert f"numbers became NaN or infinite on {them.prefix}1 alone, in step 12 (rank " in "".join(logs)
    assert f"left out: numbers became NaN or infinite on {them.prefix}1 alone, in steps 12, 20" in logs[1]
