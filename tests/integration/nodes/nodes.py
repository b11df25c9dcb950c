"""Many nodes (make test-nodes; root): a node dies and comes back, a link is cut, the store's host dies, stops.

Nodes are network namespaces with their own addresses, host names and memory tiers; storage is shared. What a loss costs
the training itself is in nodes_trainer.py, with the project's trainer. Where a test here is about dlrun alone (who is
restarted, named, excluded, stopped), its ranks run a loop of a few lines that writes down who ran when: the trainer would
add seconds to every start and nothing to what is tested.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from support import incidents
from support.dlrun import ENGINE, TRAIN, traces
from support.nodes import Nodes, nodes
from support.ranks import wait_for
from support.training import write_corpus

from flashckpt.daemon.launcher.options import NodeCheckError
from flashckpt.errors import RESUME_EXIT_CODE, LayoutError
from flashckpt.trainer.train.metrics import read_trace

pytestmark = [pytest.mark.timeout(600), pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")]

FLAGS = ("--nproc-per-node=2", "--max-restarts=3")


@pytest.fixture
def train(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    text = ENGINE.replace("snapshot_every=2, persist_every=50", "snapshot_every=5, persist_every=20")
    path.write_text(text.replace("life{life}", "life{os.environ['WORLD_SIZE']}.{report.life if report else 1}"))
    return path


def reached(folder: Path, rank: int, step: int) -> bool:
    try:
        return int((folder / f"trace{rank}").read_text().split()[-2]) >= step
    except (OSError, IndexError, ValueError):
        return False


def lived(folder: Path, world: int) -> set[int]:
    """Generations in which all `world` ranks have trained a step."""
    found: dict[int, int] = {}
    for path in folder.glob(f"life{world}.*-rank*"):
        generation = int(path.name.split(".")[1].split("-")[0])
        found[generation] = found.get(generation, 0) + bool(path.read_text())  # made first, written then
    return {generation for generation, ranks in found.items() if ranks == world}


def grew(folder: Path, world: int, after: int) -> int | None:
    later = [generation for generation in lived(folder, world) if generation > after]
    return max(later, default=None)


def start_all(them: Nodes, train: Path, count: int, nnodes: str, steps: int = 100000, pause: float = 0.1) -> None:
    for node in range(count):
        them.start(node, *FLAGS, train, them.folder, steps, pause, nnodes=nnodes)


@pytest.mark.parametrize("silent", [False, True], ids=["closes-its-connections", "falls-silent"])
def test_node_killed_the_job_shrinks_and_grows_when_it_returns(tmp_path: Path, train: Path, *, silent: bool) -> None:
    """3 nodes of 2 ranks, at least 2: the smaller world goes on from the last checkpoint, and the returning node joins it.

    A node that loses power closes no connection: the others wait in a collective for what never comes, and only its heartbeat is missing.
    """
    with nodes(tmp_path, 3) as them:
        start_all(them, train, 3, "2:3")
        them.until(lambda: lived(tmp_path, 6), "6 ranks")
        them.until(lambda: list((tmp_path / "root").glob("step-*/MANIFEST")), "a committed checkpoint")
        if silent:
            them.link(2, up=False)
        them.kill(2)
        small = them.until(partial(grew, tmp_path, 4, 1), "4 ranks")
        (found,) = them.until(lambda: incidents.in_memory(them.memory(0)), "the report")
        them.link(2, up=True)
        them.start(2, *FLAGS, train, tmp_path, 100000, 0.1, nnodes="2:3")
        them.until(partial(grew, tmp_path, 6, small), "6 ranks again")
        assert all(them.processes[node].poll() is None for node in range(3))
        reach = "it cannot be reached" if silent else "its machine answers, its dlrun does not"
        assert found.verdict.startswith(
            f"{'network' if silent else 'machine'}: node 2 ({them.prefix}2): stopped answering"
        )
        assert reach in found.verdict
        assert (found.kind, found.action) == ("node lost", "restart without that node")
        assert found.silent_s > 0.5
    for seen in traces(tmp_path, 4):
        repeated = {step: losses for step, losses in seen.items() if len(losses) > 1}
        assert not repeated, repeated


def committed(folder: Path) -> list[int]:
    return sorted(int(path.parent.name[5:14]) for path in (folder / "root").glob("step-*/MANIFEST"))


def trainer_run(folder: Path) -> list[object]:
    """A run of the project's trainer: two pipeline stages of three ranks each, no more and no fewer."""
    (folder / "run.toml").write_text(
        "[model]\ndim = 16\nlayers = 2\nheads = 2\nkv_heads = 2\nffn = 32\n[parallel]\npp = 2\ndp_shard = 3\n"
        f'[train]\nsteps = 100000\nseq_len = 8\nglobal_batch = 12\nmicro_batch = 2\ndevice = "cpu"\n'
        "[optim]\nwarmup_steps = 2\ndecay_steps = 1000\n"
        f'[data]\nsource = {write_corpus(folder / "text")}\nfolder = "{folder}/tokens"\n'
        f'[checkpoint]\nroot = "{folder}/root"\nsnapshot_every = 2\npersist_every = 10\n'
        f'[log]\nfolder = "{folder}/log"\nevery = 1000\n'
    )
    return ["-m", "flashckpt.trainer", "--config", folder / "run.toml"]


def steps(folder: Path) -> list[int]:
    return [line["step"] for line in read_trace(folder / "log" / "trace.jsonl")]


def says(them: Nodes, node: int, text: str) -> bool:
    return text in them.log(node)


def test_layout_does_not_fit_the_nodes_that_are_left_they_wait_until_one_comes_back(tmp_path: Path) -> None:
    """The layout is one of 6 ranks, not 4; the lost node is named, no rank is, and every step is trained once."""
    words = trainer_run(tmp_path)
    with nodes(tmp_path, 3) as them:
        for node in range(3):
            them.start(node, *FLAGS, *words, nnodes="2:3")
        them.until(partial(committed, tmp_path), "a committed checkpoint")
        them.kill(2)
        for node in (0, 1):
            them.until(partial(says, them, node, "2 nodes do not fit the job's layout"), "nodes that wait")
        assert [them.processes[node].poll() for node in (0, 1)] == [None, None]
        before = max(steps(tmp_path))
        them.start(2, *FLAGS, *words, nnodes="2:3")
        them.until(lambda: steps(tmp_path)[-1] > before + 20, "steps of 6 ranks again")
        them.processes[0].send_signal(signal.SIGTERM)
        assert [them.wait(node) for node in range(3)] == [RESUME_EXIT_CODE] * 3, them.log(0)
        logs = [them.log(node) for node in (0, 1)]
    assert steps(tmp_path) == list(range(1, len(steps(tmp_path)) + 1))
    for log in logs:
        assert f"node {them.address(2)} ({them.prefix}2) with ranks 4, 5 is gone" in log
        assert "exit code 1:" not in log, "no rank that only lost its peers is blamed"
        assert "the layout does not fit those there are" in log


def test_layout_fits_two_of_the_three_nodes_that_are_left_and_the_third_is_a_spare(tmp_path: Path) -> None:
    """Four stages: 8 ranks or 4, not 6. Of four nodes one is lost, then one of the two that train on: the spare comes in its place."""
    words = trainer_run(tmp_path)
    config = tmp_path / "run.toml"
    config.write_text(config.read_text().replace("layers = 2", "layers = 4").replace("pp = 2\ndp_shard = 3", "pp = 4"))
    with nodes(tmp_path, 4) as them:
        for node in range(4):
            them.start(node, *FLAGS, *words, nnodes="2:4")
        them.until(partial(committed, tmp_path), "a committed checkpoint")
        them.kill(3)
        them.until(lambda: any(says(them, node, "fits 2 of 3 nodes") for node in range(3)), "a spare")
        seen = committed(tmp_path)[-1]
        them.until(lambda: committed(tmp_path)[-1] > seen + 10, "checkpoints of 4 ranks")
        trains = max((1, 2), key=lambda node: them.log(node).count("started rank"))
        them.kill(trains)
        seen = committed(tmp_path)[-1]
        them.until(lambda: committed(tmp_path)[-1] > seen + 10, "checkpoints with the spare")
        left = [node for node in range(3) if node != trains]
        them.processes[0].send_signal(signal.SIGTERM)
        assert [them.wait(node) for node in left] == [RESUME_EXIT_CODE] * 2, them.log(0)
    assert steps(tmp_path) == list(range(1, len(steps(tmp_path)) + 1))


def test_layout_does_not_fit_and_no_node_comes_back_the_job_ends_with_its_exit_code(tmp_path: Path) -> None:
    """On the first start that is so at once; after a node was lost when the rendezvous has waited for its time."""
    words = trainer_run(tmp_path)
    with nodes(tmp_path, 3) as them:
        for node in (0, 1):
            them.start(node, *FLAGS, *words, nnodes="2:3")
        assert [them.wait(node) for node in (0, 1)] == [LayoutError.exit_code] * 2, (
            them.log(0) + "\n=====1\n" + them.log(1)
        )
        assert "waiting for more" not in them.log(0)
    with nodes(tmp_path, 3) as them:
        for node in range(3):
            them.start(node, *FLAGS, *words, nnodes="2:3", conf="join_timeout=10")
        them.until(lambda: steps(tmp_path), "steps of 6 ranks")
        them.kill(2)
        assert [them.wait(node) for node in (0, 1)] == [LayoutError.exit_code] * 2, (
            them.log(0) + "\n=====1\n" + them.log(1)
        )
        assert "no others joined in time" in them.log(0)


def test_rank_that_was_stopped_is_named_on_all_nodes(tmp_path: Path, train: Path) -> None:
    """SIGSTOP of rank 3 on node 1 of 2: node 0, whose ranks only wait for it, names it too."""
    with nodes(tmp_path, 2) as them:
        for node in range(2):
            flags = (*FLAGS, "--hang-timeout=3")
            them.start(node, *flags, train, them.folder, 100000, 0.1, nnodes="2")
        them.until(partial(reached, tmp_path, 0, 20), "20 steps")
        os.kill(int((tmp_path / "life4.1-rank3").read_text().split()[0]), signal.SIGSTOP)
        them.until(partial(grew, tmp_path, 4, 1), "4 ranks again")
        (found,) = them.until(lambda: incidents.in_memory(them.memory(0)), "the report")
        logs = [them.log(node) for node in range(2)]
    assert (found.kind, found.category, found.rank, found.host) == ("hang", "unknown", 3, f"{them.prefix}1")
    assert "in stopped (SIGSTOP); the others waited for it" in found.what
    assert f"rank 3 on {them.prefix}1 failed first" in logs[0] or "look at rank 3" in logs[0]
    assert "look at rank 3" in logs[1] or re.search(r"rank 3 \(local 1.*\n?.*it was stopped", logs[1]), logs[1]
    assert not re.search(r"rank [012] \(local .*failed first", logs[0] + logs[1])


def test_rank_killed_on_one_node_all_nodes_restart_and_keep_their_ranks(tmp_path: Path, train: Path) -> None:
    with nodes(tmp_path, 2) as them:
        start_all(them, train, 2, "2")
        them.until(partial(reached, tmp_path, 0, 20), "20 steps")
        pids = [int((tmp_path / f"life4.1-rank{rank}").read_text().split()[0]) for rank in range(4)]
        hosts = [_host(pid) for pid in pids]
        os.kill(pids[3], signal.SIGKILL)
        again = them.until(partial(grew, tmp_path, 4, 1), "4 ranks again")
        after = [int((tmp_path / f"life4.{again}-rank{rank}").read_text().split()[0]) for rank in range(4)]
        assert [_host(pid) for pid in after] == hosts
        assert "signal 9 (SIGKILL" in them.log(1) + them.log(0)


def _host(pid: int) -> str:
    """The network namespace of a process: which node it runs on."""
    return str(Path(f"/proc/{pid}/ns/net").readlink())


def test_sigterm_on_one_node_all_nodes_stop_after_the_same_step(tmp_path: Path, train: Path) -> None:
    with nodes(tmp_path, 2) as them:
        start_all(them, train, 2, "2")
        them.until(partial(reached, tmp_path, 0, 20), "20 steps")
        them.processes[1].send_signal(signal.SIGTERM)
        assert [them.wait(node) for node in range(2)] == [RESUME_EXIT_CODE] * 2, them.log(0) + them.log(1)
    last = {int((tmp_path / f"trace{rank}").read_text().split()[-2]) for rank in range(4)}
    assert len(last) == 1


def test_host_of_the_store_dies_the_others_end_with_a_clear_error(tmp_path: Path, train: Path) -> None:
    with nodes(tmp_path, 2) as them:
        start_all(them, train, 2, "1:2")
        them.until(lambda: lived(tmp_path, 4), "4 ranks")
        them.kill(0)
        assert them.wait(1) == 1
        assert "hosted the rendezvous store" in them.log(1)
        (line,) = incidents.said(them.log(1))
        assert re.match(r"(machine|network): the host of the rendezvous store, \S+:29400,: ", line), line
        assert line.endswith("-> stop")


def test_store_on_a_machine_that_does_not_train_any_training_node_may_die(tmp_path: Path, train: Path) -> None:
    """The first training node, which would have hosted the store, dies: the other goes on. Without the store nobody does."""
    with nodes(tmp_path, 3) as them:
        them.run(2, "flashckpt.daemon.store_host", 29400)
        them.until(lambda: "rendezvous store on port 29400" in them.log(2), "the store")
        for node in (0, 1):
            them.start(node, *FLAGS, train, tmp_path, 100000, 0.1, nnodes="1:2", host=2, conf="is_host=0")
        them.until(partial(committed, tmp_path), "a committed checkpoint")
        them.kill(0)
        them.until(partial(grew, tmp_path, 2, 1), "2 ranks")
        (found,) = them.until(lambda: incidents.in_memory(them.memory(1)), "the report of the one that is left")
        assert (found.kind, found.host, found.action) == ("node lost", f"{them.prefix}0", "restart without that node")
        them.start(0, *FLAGS, train, tmp_path, 100000, 0.1, nnodes="1:2", host=2, conf="is_host=0")
        them.until(partial(grew, tmp_path, 4, 2), "4 ranks again")
        them.processes[2].send_signal(signal.SIGTERM)
        assert them.wait(2) == 0, them.log(2)
        assert [them.wait(node) for node in (0, 1)] == [1, 1]
        for node in (0, 1):
            assert f"the agent at {them.address(2)}:29400 hosted the rendezvous store" in them.log(node)


def test_port_of_the_store_is_taken_the_host_says_so_and_ends() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "flashckpt.daemon.store_host", str(port)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (result.returncode, f"port {port} cannot be served" in result.stderr) == (1, True), result.stderr


def test_node_check_the_slow_and_the_broken_node_are_named_and_the_others_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """6 nodes: node 3 sends at 10 Mbit/s, node 5 cannot answer the others; 4 are left and train, and the hook knows."""
    monkeypatch.setenv("FLASHCKPT_HOOK", f"sh -c 'cat >> {tmp_path}/told'")
    train = tmp_path / "train.py"
    train.write_text(TRAIN)
    (tmp_path / "finish").touch()
    with nodes(tmp_path, 6) as them:
        them.slow_link(3, mbit=10)
        them.cut_from(5, [1, 2, 3, 4])
        for node in range(6):
            flags = ("--nproc-per-node=1", "--node-check")
            them.start(node, *flags, train, tmp_path, 5, 0.0, nnodes="4:6", conf="last_call_timeout=60")
        codes = [them.wait(node, 400) for node in range(6)]
        logs = [them.log(node) for node in range(6)]
    assert codes == [0, 0, 0, NodeCheckError.exit_code, 0, NodeCheckError.exit_code], logs
    assert "this node is excluded: the exchange with other nodes took" in logs[3]
    assert "this node is excluded: the exchange with other nodes failed" in logs[5]
    for node in (0, 1, 2, 4):
        assert re.search(r"excluded: node 3: the exchange .* took .*; node 5: the exchange .* failed", logs[node])
    told = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    unhealthy = {one["node"]: one for one in told if "-check-" in one["id"]}
    assert {(one["event"], one["host"]) for one in unhealthy.values()} == {
        ("node unhealthy", f"{them.prefix}3"),
        ("node unhealthy", f"{them.prefix}5"),
    }
    assert unhealthy[5]["reason"] == "node check: the exchange with other nodes failed"
    assert {int((tmp_path / f"life0-rank{rank}").read_text().split()[1]) for rank in range(4)} == {4}


def test_node_unit_of_three_nodes_two_train_and_the_third_joins_with_a_fourth(tmp_path: Path, train: Path) -> None:
    with nodes(tmp_path, 4) as them:
        for node in range(3):
            them.start(node, *FLAGS, "--node-unit=2", train, tmp_path, 100000, 0.1, nnodes="2:4")
        them.until(partial(grew, tmp_path, 4, 0), "4 ranks of two nodes")
        before = reached_step(tmp_path)
        them.until(lambda: reached_step(tmp_path) > before + 20, "20 steps without the third node")
        assert lived(tmp_path, 4) == {1}, "the node that waits disturbs nobody"
        them.start(3, *FLAGS, "--node-unit=2", train, tmp_path, 100000, 0.1, nnodes="2:4")
        them.until(partial(grew, tmp_path, 8, 1), "8 ranks")
        them.kill(3)
        them.until(partial(grew, tmp_path, 4, 2), "4 ranks")


def reached_step(folder: Path) -> int:
    return next(step for step in itertools.count() if not reached(folder, 0, step + 1))


def test_link_cut_for_20_seconds_training_goes_on_after_it(tmp_path: Path, train: Path) -> None:
    with nodes(tmp_path, 2) as them:
        start_all(them, train, 2, "2")
        them.until(partial(reached, tmp_path, 0, 20), "20 steps")
        before = int((tmp_path / "trace0").read_text().split()[-2])
        them.link(1, up=False)
        end = time.monotonic() + 20
        them.until(lambda: time.monotonic() > end, "20 s without the link")
        them.link(1, up=True)
        them.until(partial(reached, tmp_path, 0, before + 50), "steps after the cut")


MEMORY = Path("/sys/fs/cgroup/memory")


@pytest.mark.skipif(not os.access(MEMORY / "cgroup.procs", os.W_OK), reason="no control group of version 1 to write to")
def test_rank_that_the_kernel_kills_for_memory_is_told_from_a_stray_kill(tmp_path: Path) -> None:
    """dlrun and its ranks in a control group of 2 GB; one rank takes 3 GB."""
    script = tmp_path / "greedy.py"
    script.write_text("import os, time\nif os.environ['RANK'] == '1': kept = b'x' * (3 << 30)\ntime.sleep(600)\n")
    group = MEMORY / f"flashckpt-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(2 << 30))
        enter = f'echo $$ > {group}/cgroup.procs; exec "$@"'
        words = [
            sys.executable,
            "-m",
            "flashckpt.daemon.run",
            "--standalone",
            "--nproc-per-node=2",
            str(script),
        ]
        command = ["sh", "-c", enter, "sh", *words]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path, check=False)
    finally:
        wait_for(lambda: not (group / "cgroup.procs").read_text(), what="an empty control group")
        group.rmdir()
    assert result.returncode == 1, result.stderr
    assert "rank 1 (local 1" in result.stderr
    assert "signal 9 (SIGKILL, exit code 137): out of memory: the kernel's OOM killer" in result.stderr
    lines = incidents.said(result.stderr)
    assert lines
    assert all(line.startswith("memory: rank 1 (pid") for line in lines), lines
