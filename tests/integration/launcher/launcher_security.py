"""What a stranger who reaches dlrun's ports can do: connect to one node not at all from outside, run code nowhere."""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import os
import pickle
import signal
import socket
import stat
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import warm
from support.dlrun import ENGINE, Launch, dlrun, first_steps, processes_of
from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousSettings,
    RendezvousTimeout,
    _NodeDesc,
)

from flashckpt.daemon.launcher import job_secret, job_state, shared_state
from flashckpt.daemon.launcher.job_secret import Seal, UnsealedError
from flashckpt.daemon.launcher.job_state import JobState
from flashckpt.errors import ConfigError
from flashckpt.shm import agent_folder
from flashckpt.shm.job_directory import memory_root

pytestmark = pytest.mark.timeout(300)
SECRET = "correct-horse-battery-staple"
WAIT = """
import os, sys, time, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
assert not [name for name in os.environ if name.startswith("FLASHCKPT_JOB_SECRET")]
from flashckpt.shm.agent_folder import ranks_key
open(f"{sys.argv[1]}/key{dist.get_rank()}", "w").write(ranks_key().hex())
mode = os.stat(os.path.join(os.environ["FLASHCKPT_AGENT_DIR"], "key")).st_mode & 0o7777 if ranks_key() else 0o600
assert mode == 0o600, mode
open(f"{sys.argv[1]}/up{dist.get_rank()}", "w").close()
while not os.path.exists(f"{sys.argv[1]}/finish"): time.sleep(0.05)
dist.barrier()
"""
ATTACK = """
import sys
from datetime import timedelta
from torch._C._distributed_c10d import TCPStore
port, payload, names = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=20))
for name in names:
    store.set(name, payload)
"""


class Code:
    """Creates a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def poison(port: int, witness: Path, *keys: str) -> None:
    """Put a pickle that runs code in place of these keys of a store: TCP does not say which user connects."""
    payload = base64.b64encode(pickle.dumps(Code(witness))).decode()
    program = witness.with_name("attack.py")
    program.write_text(ATTACK)
    warm.run([str(program), str(port), payload, *keys], witness.parent, timeout=120).check_returncode()


def listening(pids: list[int]) -> set[tuple[str, int]]:
    """Addresses (as /proc/net/tcp writes them) and ports on which these processes listen."""
    found = set()
    inodes = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(str(fd.readlink()))
            except OSError:
                continue
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                address, port = words[1].split(":")
                found.add((address, int(port, 16)))
    return found


def in_an_argument_list(secret: str) -> list[str]:
    """Processes of this machine that show the secret to every user."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            data = path.read_bytes()
        except OSError:
            continue  # it has ended
        if secret.encode() in data:
            found.append(path.parent.name)
    return found


def family(launch: Launch) -> list[int]:
    children = Path(f"/proc/{launch.process.pid}/task/{launch.process.pid}/children").read_text().split()
    return [launch.process.pid, *map(int, children)]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "wait.py"
    path.write_text(WAIT)
    return path


def up(folder: Path, count: int = 2) -> bool:
    return len(list(folder.glob("up*"))) == count


KEYS = ("torch.rendezvous.victim", "flashckpt.rendezvous.victim", "flashckpt/first-failure")
FLAGS = ("--nproc-per-node=2", "--max-restarts=0", "--rdzv-id=victim")


def test_one_node_listens_on_the_loopback_address_only_and_no_pickle_in_its_stores_is_decoded(
    tmp_path: Path, script: Path
) -> None:
    with dlrun(tmp_path, *FLAGS, script, tmp_path) as launch:
        launch.until(lambda: up(tmp_path), "the ranks")
        sockets = listening(family(launch))
        assert sockets
        assert {address for address, _ in sockets} == {"0100007F"}, sockets
        agent = {port for _, port in listening([launch.process.pid])}
        for port in agent:
            poison(port, tmp_path / "pwned", *KEYS)
        (tmp_path / "finish").touch()
        assert launch.wait() == 0
    assert agent
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("secret", ["", SECRET])
def test_several_nodes_a_pickle_in_place_of_the_state_is_refused_and_not_decoded(
    tmp_path: Path, script: Path, secret: str
) -> None:
    port = free_port()
    nodes = ("--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}")
    env = {"FLASHCKPT_JOB_SECRET": secret} if secret else {}
    with dlrun(tmp_path, *FLAGS, *nodes, script, tmp_path, env=env) as launch:
        launch.until(lambda: up(tmp_path), "the ranks")
        assert not secret or not in_an_argument_list(secret)
        key = agent_folder.derived(secret.encode(), "ranks").hex()
        assert [(tmp_path / f"key{rank}").read_text() for rank in range(2)] == [key] * 2
        poison(port, tmp_path / "pwned", *KEYS)
        assert launch.wait() == 1
    assert not (tmp_path / "pwned").exists()
    assert "the rendezvous store holds data that no node of this job wrote" in launch.output
    assert ("no job secret" in launch.output) == (not secret)
    assert SECRET not in launch.output
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]


@pytest.mark.parametrize("flags", [(), ("--no-zygote",)])
def test_no_process_of_a_job_shows_the_secret_in_its_environment(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """dlrun, zygote, ranks and persister; also the zygote and the persister that are started in place of killed ones."""
    (tmp_path / "train.py").write_text(ENGINE)
    env = {"FLASHCKPT_JOB_SECRET": SECRET}
    with dlrun(
        tmp_path, *flags, "--nproc-per-node=2", tmp_path / "train.py", tmp_path, 10**6, 0.01, env=env, fresh=True
    ) as launch:
        launch.until(partial(first_steps, tmp_path, 0, 2), "the ranks")
        for life in range(2):
            pids = launch.until(partial(persisted_by, tmp_path, life), "the persister")
            assert len(pids) >= 4 + (not flags)
            assert not [pid for pid in pids if SECRET.encode() in Path(f"/proc/{pid}/environ").read_bytes()]
            if life == 0:
                for pid in set(pids) - {launch.process.pid}:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                launch.until(partial(first_steps, tmp_path, 1, 2), "the next life")
        launch.process.send_signal(signal.SIGTERM)
        assert launch.wait() == 75, launch.output


def persisted_by(folder: Path, life: int) -> list[int]:
    """Every process of the job of this life, [] until its persister is there."""
    persisters = [pid for pid, line in processes_of(memory_root()).items() if "persister" in line]
    return [*processes_of(folder), *persisters] if persisters and first_steps(folder, life, 2) else []


def test_two_nodes_listen_on_the_address_by_which_they_reach_each_other(tmp_path: Path, script: Path) -> None:
    """Two nodes on one machine, which has all of 127.0.0.0/8: the store of the rendezvous, and that of the workers."""
    port = free_port()
    nodes = ("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.2:{port}", "--node-check")
    flags = (*FLAGS, *nodes, "--nproc-per-node=1")
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    env = {"FLASHCKPT_JOB_SECRET": SECRET}
    with (
        dlrun(folders[0], *flags, "--local-addr=127.0.0.2", script, tmp_path, env=env) as one,
        dlrun(folders[1], *flags, "--local-addr=127.0.0.3", script, tmp_path, env=env) as two,
    ):
        one.until(lambda: up(tmp_path), "the ranks")
        sockets = listening([one.process.pid, two.process.pid])
        (tmp_path / "finish").touch()
        assert [one.wait(), two.wait()] == [0, 0]
    places = sorted(address for address, _ in sockets)
    assert places == ["0200007F"] * 3 + ["0300007F"], "the rendezvous, the workers' store, and a seat of each agent"
    assert ("0200007F", port) in sockets
    assert "all addresses" not in one.output + two.output


FAIL = (
    WAIT
    + """
if dist.get_rank() == 1:
    raise ValueError("the true cause")
dist.barrier()
"""
)
FORGED = {
    "flashckpt/stop/request": "1",
    "flashckpt/stop/after": "1",
    "flashckpt/first-failure": json.dumps({"rank": 0, "host": "victim", "cause": "a forged report", "step": 1}),
    "flashckpt/node/1": json.dumps({"host": "a forged name", "ranks": [1]}),
    "torchelastic/agent/terminal_state/num_members": "9",
    "torchelastic/agent/terminal_state/last_member": "1",
}
"""What an agent would obey if it were not signed: a stop, a failure, a node, and the end of all nodes."""


def forge(port: int, folder: Path, values: dict[str, str]) -> None:
    """Write values into a store, as a stranger who reaches its port."""
    for number, value in enumerate(sorted(set(values.values()))):
        program = folder / f"attack{number}.py"
        program.write_text(ATTACK)
        keys = [key for key in values if values[key] == value]
        warm.run([str(program), str(port), value, *keys], folder, timeout=120).check_returncode()


@pytest.mark.parametrize("form", ["unsigned", "marked as a job without a secret marks them"])
def test_two_nodes_do_not_stop_blame_or_leave_because_a_stranger_says_so(tmp_path: Path, form: str) -> None:
    script, port = tmp_path / "fail.py", free_port()
    script.write_text(FAIL)
    nodes = ("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}")
    flags = (*nodes, "--rdzv-id=victim", "--max-restarts=0", "--grace-timeout=1", script, tmp_path)
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    env = {"FLASHCKPT_JOB_SECRET": SECRET}
    with dlrun(folders[0], *flags, env=env) as one, dlrun(folders[1], *flags, env=env) as two:
        one.until(lambda: up(tmp_path), "the ranks")
        mark = "" if form == "unsigned" else "- "
        round_of = "torch.rendezvous.victim.0/"
        forge(port, tmp_path, {round_of + key: mark + value for key, value in FORGED.items()})
        forge(port, tmp_path, {"flashckpt.job.victim.left": f"{mark}9", "flashckpt.job.victim.end": f"{mark}11"})
        for launch in (one, two):
            launch.until(partial(launch.says, "flashckpt/stop/request in the rendezvous store is ignored"), "a line")
        (tmp_path / "finish").touch()
        assert [one.wait(), two.wait()] == [1, 1]
    theirs, mine = sorted((one.output, two.output), key=lambda text: "the true cause" in text)
    assert "the true cause" in mine
    assert "rank 1 on " in theirs, "from the report that the other node has signed"
    for launch in (one, two):
        assert "forged" not in launch.output
        assert "stop after step" not in launch.output
        assert launch.output.count("flashckpt/stop/request") == 1
        assert SECRET not in launch.output


def test_stock_torchrun_runs_the_code(tmp_path: Path, script: Path) -> None:
    """The attack is a real one: otherwise the tests above would show nothing."""
    port = free_port()
    nodes = ("--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}")
    with dlrun(tmp_path, *FLAGS, *nodes, script, tmp_path, torchrun=True) as launch:
        launch.until(lambda: up(tmp_path), "the ranks")
        poison(port, tmp_path / "pwned", KEYS[0])
        launch.until((tmp_path / "pwned").exists, "the code that torchrun ran")


NOW = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=timezone.utc)
A, B, C = _NodeDesc("a", 1, 0), _NodeDesc("b\u00fc", 2, 1), _NodeDesc("c", 3, 1)


def some_state(now: datetime = NOW) -> JobState:
    state = JobState()
    state.draw()
    state.round, state.complete, state.deadline = 3, True, now + timedelta(seconds=2)
    state.participants, state.wait_list, state.redundancy_list = {B: 1, A: 0}, {A, B}, {B}
    state.last_heartbeats, state.lost = {A: now, B: now}, {C: [3, 1500, 1]}
    return state


def test_state_survives_its_encoding() -> None:
    state = some_state()
    again = job_state.decode(job_state.encode(state))
    assert again.last_heartbeats.keys() == state.last_heartbeats.keys(), "what keeps nodes alive is no part of the text"
    again.last_heartbeats = state.last_heartbeats
    assert vars(again) == vars(state)
    assert job_state.encode(copy.deepcopy(again)) == job_state.encode(state)
    assert vars(job_state.decode(job_state.encode(JobState()))) == vars(JobState())


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_state_that_is_damaged_is_refused_with_one_error(data: st.DataObject) -> None:
    """Mutations of the text, with the right signature: a state, or RendezvousStateError, and nothing else."""
    text = job_state.encode(some_state())
    at = data.draw(st.integers(0, len(text) - 1))
    new = data.draw(st.sampled_from(["", "1", "[", "]", "{", "}", ":", ",", '"', "null", "-", "1e999", "[" * 5000]))
    store = HashStore()
    holder = shared_state.SharedState(store, of_run("x"), Seal(b"s" * 16, "p"))
    store.set("flashckpt.rendezvous.x", Seal(b"s" * 16, "p").close(text[:at] + new + text[at + 1 :]).decode())
    try:
        holder.sync()
    except RendezvousStateError:
        return
    assert isinstance(holder.state, JobState)


def of_run(run_id: str) -> RendezvousSettings:
    return RendezvousSettings(run_id, 1, 2, RendezvousTimeout(), timedelta(seconds=60), 3)


def test_two_nodes_see_each_others_changes_and_a_stale_one_is_not_taken() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    seal = Seal(SECRET.encode(), "rendezvous x")
    one, two = (shared_state.SharedState(server, of_run("x"), seal) for _ in range(2))
    assert (one.sync(), two.sync()) == (None, None)
    one.state.participants[A] = 0
    one.mark_dirty()
    assert one.sync() is True
    two.state.round = 9
    two.mark_dirty()
    assert two.sync() is False, "it had not seen the change of the other"
    assert two.state.participants == {A: 0}
    stranger = shared_state.SharedState(server, of_run("x"), Seal(b"another secret of a job", "rendezvous x"))
    with pytest.raises(RendezvousStateError, match="not signed with the job secret"):
        stranger.sync()
    with pytest.raises(RendezvousStateError, match="no job secret"):
        shared_state.SharedState(server, of_run("x"), Seal(b"", "rendezvous x")).sync()


def test_seal_opens_only_with_its_secret_and_purpose() -> None:
    data = Seal(SECRET.encode(), "one").close("text of some length")
    assert Seal(SECRET.encode(), "one").open(data) == "text of some length"
    wrong = [Seal(b"x" * 20, "one"), Seal(SECRET.encode(), "two"), Seal(b"", "one")]
    changed = [data[:-1], data + b"x", b"", b"\xff", b"- text", data.replace(b" ", b"", 1)]
    for seal, message in [*((seal, data) for seal in wrong), *((Seal(SECRET.encode(), "one"), one) for one in changed)]:
        with pytest.raises(UnsealedError):
            seal.open(message)


def test_secret_comes_by_the_environment_or_a_file_that_nobody_else_can_read(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(SECRET + "\n")
    path.chmod(0o600)
    assert job_secret.read_secret({}) == b""
    assert job_secret.read_secret({job_secret.VARIABLE: SECRET}) == SECRET.encode()
    assert job_secret.read_secret({job_secret.FILE_VARIABLE: str(path)}) == SECRET.encode()
    path.chmod(0o604)
    assert stat.S_IMODE(path.stat().st_mode) == 0o604
    with pytest.raises(ConfigError, match="others can read"):
        job_secret.read_secret({job_secret.FILE_VARIABLE: str(path)})
    for name, value in ((job_secret.FILE_VARIABLE, str(tmp_path / "absent")), (job_secret.VARIABLE, "12ab")):
        with pytest.raises(ConfigError) as caught:
            job_secret.read_secret({name: value})
        assert value not in str(caught.value) or name == job_secret.FILE_VARIABLE
