"""What PyTorch's own launcher tests expect of torchrun, asked of dlrun (docs/launching.md lists each of them).

Called in process as `main(args)`, as PyTorch's tests call torchrun's. In a file and a pytest process of
its own (`make test-launcher`): the agent leaves threads behind, and other tests fork.
"""

from __future__ import annotations

import io
import multiprocessing as mp
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from support.ranks import wait_for
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
    _RendezvousExitOp,
)
from torch.distributed.launcher.api import LaunchConfig

from flashckpt.daemon.launcher import cli as dlrun
from flashckpt.daemon.launcher import job_secret
from flashckpt.daemon.launcher.options import RendezvousLostError
from flashckpt.daemon.launcher.rendezvous import OneNode
from flashckpt.daemon.launcher.rounds import FreshStoreRendezvous, JobNotes
from flashckpt.errors import ConfigError

pytestmark = pytest.mark.timeout(300)

SCRIPT = """
import argparse, os, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("--touch-file-dir")
parser.add_argument("--fail", action="store_true")
args = parser.parse_args()
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE",
         "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
         "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"]
missing = [name for name in names if name not in os.environ]
assert not missing, missing
assert os.environ["PARENT_SENTINEL"] == "here"
if args.fail:
    raise RuntimeError("failed on purpose")
pathlib.Path(args.touch_file_dir, os.environ["RANK"]).touch()
"""
SHELL = '#!/bin/sh\nset -e\necho "creating $1/$RANK"\ntouch "$1/$RANK"\n'
INIT = """
import sys
import torch.distributed as dist
import os
method = sys.argv[1]
if method.startswith("tcp"):
    dist.init_process_group("gloo", init_method=method, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
else:
    dist.init_process_group("gloo", init_method=method)
assert dist.is_torchelastic_launched()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PARENT_SENTINEL", "here")


@pytest.fixture
def touched(tmp_path: Path) -> Path:
    path = tmp_path / "touched"
    path.mkdir()
    return path


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.fixture
def shell(tmp_path: Path) -> str:
    path = tmp_path / "script.sh"
    path.write_text(SHELL)
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def init(tmp_path: Path) -> str:
    path = tmp_path / "init.py"
    path.write_text(INIT)
    return str(path)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("localhost", 0))
        return int(sock.getsockname()[1])


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def ranks(count: int) -> set[str]:
    return {str(rank) for rank in range(count)}


BASE = ["--nnodes=1", "--nproc-per-node=4", "--monitor-interval=1", "--start-method=spawn"]
CONF = "--rdzv-conf=join_timeout=60,last_call_timeout=1,timeout=5"
ELASTIC = [
    "--nnodes=1:2",
    "--nproc-per-node=2",
    "--rdzv-backend=c10d",
    CONF,
]


def test_user_script_python(script: str, touched: Path) -> None:
    dlrun.main([*BASE, "--rdzv-id=one", script, f"--touch-file-dir={touched}"])
    assert names(touched) == ranks(4)


def test_user_script_python_with_master_address_and_port(script: str, touched: Path) -> None:
    address = ["--master-addr=localhost", f"--master-port={free_port()}", "--node-rank=0"]
    dlrun.main([*BASE, *address, script, f"--touch-file-dir={touched}"])
    assert names(touched) == ranks(4)


def test_user_script_bash_and_no_python_excludes_module(shell: str, touched: Path) -> None:
    with pytest.raises(ValueError, match="--no-python"):
        dlrun.main([*BASE, "--no-python", "--module", shell, str(touched)])
    dlrun.main([*BASE, "--no-python", shell, str(touched)])
    assert names(touched) == ranks(4)


def test_default_number_of_processes_is_one(shell: str, touched: Path) -> None:
    dlrun.main(["--nnodes=1", "--rdzv-id=x", "--no-python", shell, str(touched)])
    assert names(touched) == ranks(1)


def test_settings_from_environment(shell: str, touched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"NNODES": "1", "NPROC_PER_NODE": "4", "RDZV_ID": "x", "MONITOR_INTERVAL": "1", "START_METHOD": "spawn"}
    for name, value in {**values, "NO_PYTHON": "1", "MODULE": "1"}.items():
        monkeypatch.setenv(f"PET_{name}", value)
    with pytest.raises(ValueError, match="--no-python"):
        dlrun.main([shell, str(touched)])
    monkeypatch.setenv("PET_MODULE", "0")
    dlrun.main([shell, str(touched)])
    assert names(touched) == ranks(4)


def test_number_of_processes_auto_is_the_processor_count(shell: str, touched: Path) -> None:
    with mock.patch("torch.accelerator.is_available", return_value=False):
        dlrun.main(["--nnodes=1", "--nproc-per-node=auto", "--no-python", shell, str(touched)])
    count = getattr(torch._utils, "cpu_count", os.cpu_count)  # torch 2.11 asks os
    assert names(touched) == ranks(count() or 0)


def test_number_of_processes_gpu_is_the_device_count(shell: str, touched: Path) -> None:
    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("torch.cuda.device_count", return_value=3),
    ):
        dlrun.main(["--nnodes=1", "--nproc-per-node=gpu", "--no-python", shell, str(touched)])
    assert names(touched) == ranks(3)


def test_number_of_processes_unknown_word(shell: str, touched: Path) -> None:
    with pytest.raises(ValueError, match="unknown"):
        dlrun.main(["--nnodes=1", "--nproc-per-node=unknown", "--no-python", shell, str(touched)])


def test_elastic_with_one_of_two_nodes(script: str, touched: Path) -> None:
    dlrun.main(
        [*ELASTIC, f"--rdzv-endpoint=localhost:{free_port()}", "--rdzv-id=x", script, f"--touch-file-dir={touched}"]
    )
    assert names(touched) == ranks(2)


def test_elastic_two_agents(script: str, touched: Path) -> None:
    args = [*ELASTIC, f"--rdzv-endpoint=localhost:{free_port()}", "--rdzv-id=x", script, f"--touch-file-dir={touched}"]
    args[0] = "--nnodes=2"
    other = subprocess.Popen([sys.executable, "-m", "flashckpt.daemon.run", *args])
    dlrun.main(args)
    assert other.wait(60) == 0
    assert names(touched) == ranks(4)


def test_nodes_that_never_come_are_named_not_the_store(script: str, touched: Path) -> None:
    args = [*ELASTIC, f"--rdzv-endpoint=localhost:{free_port()}", "--rdzv-id=x", script, f"--touch-file-dir={touched}"]
    args[0], args[args.index(CONF)] = "--nnodes=2", CONF.replace("join_timeout=60", "join_timeout=1")
    with pytest.raises(RendezvousLostError, match="fewer than 2 nodes met at localhost"):
        dlrun.main(args)


def test_worker_exception_is_raised_and_recorded_once(script: str) -> None:
    endpoint = f"--rdzv-endpoint=localhost:{free_port()}"
    with (
        mock.patch("torch.distributed.elastic.events.record") as record,
        pytest.raises(ChildFailedError) as caught,
    ):
        dlrun.main([*ELASTIC, endpoint, "--rdzv-id=x", "--max-restarts=0", script, "--fail"])
    record.assert_called_once()
    _, first = caught.value.get_first_failure()
    assert "failed on purpose" in str(caught.value)
    assert first.exitcode == 1


def test_agent_exception_is_raised_and_recorded_once(script: str, touched: Path) -> None:
    class BrokenError(Exception):
        pass

    target = "torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent._rendezvous"
    with (
        mock.patch("torch.distributed.elastic.events.record") as record,
        mock.patch(target, side_effect=BrokenError),
        pytest.raises(BrokenError),
    ):
        dlrun.main([*BASE, "--rdzv-id=x", script, f"--touch-file-dir={touched}"])
    record.assert_called_once()


def test_rendezvous_is_shut_down_once_after_success(script: str, touched: Path) -> None:
    endpoint = f"--rdzv-endpoint=localhost:{free_port()}"
    for handler, flags in ((OneNode, BASE), (DynamicRendezvousHandler, [*ELASTIC, endpoint])):
        with mock.patch.object(handler, "shutdown", autospec=True, side_effect=handler.shutdown) as shutdown:
            dlrun.main([*flags, "--rdzv-id=x", script, f"--touch-file-dir={touched}"])
        shutdown.assert_called_once()


def test_rendezvous_that_somebody_has_put_in_torchs_place_is_kept(script: str, touched: Path) -> None:
    rendezvous = OneNode("x", "theirs")
    with mock.patch(
        "torch.distributed.elastic.rendezvous.registry.get_rendezvous_handler", return_value=rendezvous
    ) as get:
        dlrun.main([*BASE, "--rdzv-id=x", script, f"--touch-file-dir={touched}"])
    get.assert_called_once()
    assert names(touched) == ranks(4)


def test_standalone(script: str, touched: Path) -> None:
    dlrun.main([*BASE, "--standalone", script, f"--touch-file-dir={touched}"])
    assert names(touched) == ranks(4)


def test_run_path(script: str, touched: Path) -> None:
    dlrun.main(["--run-path", *BASE, script, f"--touch-file-dir={touched}"])
    assert names(touched) == ranks(4)


def test_min_and_max_nodes_are_parsed() -> None:
    parse = dlrun.parse_min_max_nnodes
    assert parse("1") == (1, 1)
    assert parse("2:20") == (2, 20)
    with pytest.raises(RuntimeError):
        parse("2:20:30")


def test_logs_specs_entry_point_must_exist(script: str) -> None:
    with pytest.raises(ValueError, match="DOESNOT_EXIST"):
        dlrun.main(["--run-path", "--logs_specs=DOESNOT_EXIST", script])


@pytest.mark.parametrize("method", ["tcp", "env"])
def test_init_method_with_master_address(init: str, method: str) -> None:
    port = free_port()
    url = "env://" if method == "env" else f"tcp://localhost:{port}"
    address = ["--master-addr=localhost", f"--master-port={port}"]
    dlrun.main(["--run-path", "--nnodes=1", "--nproc-per-node=4", *address, init, url])


def test_log_lines_are_captured_with_the_prefix_of_the_template(shell: str, touched: Path) -> None:
    captured = io.StringIO()
    template = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank${rank}]: "}
    with redirect_stdout(captured), mock.patch.dict(os.environ, template):
        dlrun.main([*BASE, "--redirect=3", "--tee=3", "--no-python", shell, str(touched)])
    assert all(f"[rank{rank}]: creating " in captured.getvalue() for rank in range(4))


# -- LocalElasticAgent: what its tests expect of an agent with one node


def launch(tmp_path: Path, text: str, *flags: str) -> None:
    path = tmp_path / "agent_script.py"
    path.write_text(text)
    dlrun.main([*flags, str(path), str(tmp_path)])


def test_agent_restarts_up_to_the_limit_and_counts_them(tmp_path: Path) -> None:
    text = (
        "import os, pathlib, sys\n"
        "pathlib.Path(sys.argv[1], 'count' + os.environ['TORCHELASTIC_RESTART_COUNT']).touch()\n"
        "sys.exit(0 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '2' else 1)\n"
    )
    launch(tmp_path, text, "--max-restarts=2")
    assert {f"count{n}" for n in range(3)} <= names(tmp_path)
    with pytest.raises(ChildFailedError):
        launch(tmp_path, text, "--max-restarts=1")


def test_agent_failure_of_one_rank_ends_the_others(tmp_path: Path) -> None:
    text = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(9)\ntime.sleep(600)\n"
    begun = time.monotonic()
    with pytest.raises(ChildFailedError) as caught:
        launch(tmp_path, text, "--nproc-per-node=3", "--max-restarts=0")
    assert time.monotonic() - begun < 60
    assert set(caught.value.failures) == {1}
    assert caught.value.failures[1].exitcode == 9


def test_agent_shutdown_timeout_is_obeyed_on_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A survivor that ignores SIGTERM costs --shutdown-timeout, not torchrun's 30 s."""
    option = ["--shutdown-timeout=2"]
    if "--shutdown-timeout" not in dlrun.get_args_parser().format_help():  # torch 2.11 has the variable only
        option = []
        monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "2")
    text = (
        "import os, pathlib, signal, sys, time\n"
        "if os.environ['RANK'] == '0':\n"
        "    signal.signal(signal.SIGTERM, lambda *_: pathlib.Path(sys.argv[1], 'asked').touch())\n"
        "    pathlib.Path(sys.argv[1], 'ready').touch()\n"
        "    while True: time.sleep(1)\n"
        "while not pathlib.Path(sys.argv[1], 'ready').exists(): time.sleep(0.01)\n"
        "pathlib.Path(sys.argv[1], 'failed').write_text(str(time.time()))\n"
        "os._exit(1)\n"
    )
    with pytest.raises(ChildFailedError):
        launch(tmp_path, text, "--nproc-per-node=2", *option, "--max-restarts=0")
    waited = time.time() - float((tmp_path / "failed").read_text())
    assert (tmp_path / "asked").exists()
    assert 1.5 < waited < 20


def test_agent_forwards_signals_and_puts_handlers_back(tmp_path: Path) -> None:
    text = "import pathlib, sys, time\npathlib.Path(sys.argv[1], 'up').touch()\ntime.sleep(600)\n"
    path = tmp_path / "agent_script.py"
    path.write_text(text)
    before = signal.getsignal(signal.SIGTERM)
    child = mp.get_context("fork").Process(target=_signal_when, args=(tmp_path / "up", os.getpid()))
    child.start()
    with pytest.raises(Exception, match="got signal"):
        dlrun.main(["--nproc-per-node=2", str(path), str(tmp_path)])
    child.join()
    assert signal.getsignal(signal.SIGTERM) is before


def _signal_when(path: Path, pid: int) -> None:
    while not path.exists():
        time.sleep(0.01)
    os.kill(pid, signal.SIGTERM)


def test_names_of_torchruns_module_are_offered() -> None:
    for name in (
        "parse_args",
        "get_args_parser",
        "config_from_args",
        "run",
        "elastic_launch",
        "run_script_path",
        "record",
    ):
        assert callable(getattr(dlrun, name))
    assert dlrun.LaunchConfig is LaunchConfig
    assert dlrun.parse_args(["--nproc_per_node", "2", "--rdzv_backend=c10d", "x.py"]).nproc_per_node == "2"


def test_every_torchrun_flag_in_every_spelling_is_known() -> None:
    from torch.distributed import run as torchrun

    ours = dlrun.get_args_parser()._option_string_actions
    theirs = torchrun.get_args_parser()._option_string_actions
    assert set(theirs) <= set(ours)
    assert {name: type(action) for name, action in theirs.items()} == {name: type(ours[name]) for name in theirs}


class Meeting:
    """Nodes of one rendezvous, in threads: each joins, and says which place of how many it got."""

    def __init__(self, unit: int, *, least: int, most: int) -> None:
        self.store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.unit, self.least, self.most, self.last_call_s = unit, least, most, 2.0
        self.threads: list[threading.Thread] = []
        self.places: dict[str, tuple[int, int] | str] = {}
        self.nodes: dict[str, FreshStoreRendezvous] = {}

    def join(self, name: str) -> None:
        if name not in self.nodes:
            handler = DynamicRendezvousHandler.from_backend(
                "meeting",
                TCPStore("localhost", self.store.port, is_master=False),
                C10dRendezvousBackend(self.store, "meeting"),
                self.least,
                self.most,
                local_addr=name,
                timeout=RendezvousTimeout(join=timedelta(seconds=4), last_call=timedelta(seconds=self.last_call_s)),
            )
            self.nodes[name] = FreshStoreRendezvous(handler, unit=self.unit)
        self.places.pop(name, None)
        thread = threading.Thread(target=self._join, args=(name,), daemon=True)
        self.threads.append(thread)
        thread.start()

    def _join(self, name: str) -> None:
        try:
            info = self.nodes[name].next_rendezvous()
        except RendezvousError as error:
            self.places[name] = type(error).__name__
            return
        self.places[name] = (info.rank, info.world_size)

    def until(self, wanted: dict[str, tuple[int, int] | str]) -> None:
        wait_for(lambda: self.places == wanted, what=f"{wanted}, have {self.places}")

    def end(self) -> None:
        """Leave no thread behind: one that talks to a store while the interpreter ends takes the process down."""
        for node in self.nodes.values():
            node.may_close = True
            node.shutdown()  # the first closes the rendezvous, and whoever waits gives up; each stops its heartbeats
        for thread in self.threads:
            thread.join(30)
            assert not thread.is_alive(), f"{thread.name} still waits for a rendezvous that is closed"
        for node in self.nodes.values():
            cast("DynamicRendezvousHandler", node.inner)._stop_heartbeats()


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Meeting]:
    """Nodes that join by twos; they have made-up addresses, and the workers' store that the first opens is here."""

    def here(_self: Any, _address: str, port: int) -> TCPStore:
        return TCPStore("localhost", port, is_master=True, wait_for_workers=False)

    monkeypatch.setattr(DynamicRendezvousHandler, "_create_tcp_store_server", here)
    nodes = Meeting(2, least=2, most=4)
    yield nodes
    nodes.end()


def test_node_unit_the_node_that_is_over_waits_and_joins_with_another_or_in_place_of_one_that_leaves(
    meeting: Meeting,
) -> None:
    for name in "abc":
        meeting.join(name)
    wait_for(lambda: len(meeting.places) == 2, what="a round of two")
    assert sorted(meeting.places.values()) == [(0, 2), (1, 2)]
    (over,) = set("abc") - set(meeting.places)
    first, second = sorted(meeting.places)
    assert meeting.nodes[first].num_nodes_waiting() == 0, "one node alone is no reason to begin again"
    meeting.join("d")
    wait_for(lambda: meeting.nodes[first].num_nodes_waiting() == 2, what="two nodes that wait")
    for name in (first, second):
        meeting.join(name)
    wait_for(lambda: len(meeting.places) == 4, what="a round of four")
    assert sorted(meeting.places.values()) == [(rank, 4) for rank in range(4)], meeting.places
    assert over in meeting.places


def test_node_unit_nodes_that_trained_stay_and_a_spare_comes_in_place_of_one_that_left(meeting: Meeting) -> None:
    """b and c train, a comes later: it sorts first, but has no snapshots in memory."""
    for name in "bc":
        meeting.join(name)
    meeting.until({"b": (0, 2), "c": (1, 2)})
    meeting.join("a")
    wait_for(lambda: int(meeting.nodes["b"].inner.num_nodes_waiting()) == 1, what="a waiting node")
    for name in "bc":  # a worker failed: both begin again
        meeting.join(name)
    meeting.until({"b": (0, 2), "c": (1, 2)})
    meeting.join("c")  # c begins again; b is told at once, though only one node waits besides it
    wait_for(lambda: meeting.nodes["b"].num_nodes_waiting() > 0, what="b is told")


def test_node_unit_waits_longer_than_the_join_timeout_and_ends_with_the_job(meeting: Meeting) -> None:
    for name in "ab":
        meeting.join(name)
    meeting.until({"a": (0, 2), "b": (1, 2)})
    meeting.join("c")
    end = time.monotonic() + 6  # beyond the 4 s of the join timeout
    wait_for(lambda: time.monotonic() > end, what="the time")
    assert "c" not in meeting.places
    meeting.nodes["a"].may_close = True
    meeting.nodes["a"].shutdown()
    meeting.until({"a": (0, 2), "b": (1, 2), "c": "RendezvousGracefulExitError"})


@pytest.fixture
def layout(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> Meeting:
    """Nodes that join one by one, of a job whose layout was found not to fit three."""
    monkeypatch.setattr(meeting, "unit", 1)
    JobNotes(meeting.store, "meeting", job_secret.read_secret()).refuse(3)
    return meeting


def test_a_node_that_the_layout_has_no_place_for_is_a_spare_until_another_comes(layout: Meeting) -> None:
    for name in "abc":
        layout.join(name)
    wait_for(lambda: len(layout.places) == 2, what="a round of two")
    (spare,) = set("abc") - set(layout.places)
    first, second = sorted(layout.places)
    wait_for(lambda: int(layout.nodes[first].inner.num_nodes_waiting()) == 1, what="the spare")
    assert layout.nodes[first].num_nodes_waiting() == 0, "no place for it: no reason to begin again"
    end = time.monotonic() + 6  # beyond the 4 s of the join timeout
    wait_for(lambda: time.monotonic() > end, what="the time")
    assert spare not in layout.places
    layout.join("d")
    wait_for(lambda: layout.nodes[first].num_nodes_waiting() == 2, what="two nodes that fit")
    for name in (first, second):
        layout.join(name)
    wait_for(lambda: len(layout.places) == 4, what="a round of four")
    assert sorted(layout.places.values()) == [(rank, 4) for rank in range(4)], layout.places
    assert (layout.nodes[first].may_grow(), layout.nodes[first].may_shrink()) == (False, True)


def test_a_spare_comes_in_place_of_a_node_that_left(layout: Meeting) -> None:
    layout.last_call_s = 0.5  # well below the join timeout: a node that joins late begins it again
    for name in "bc":
        layout.join(name)
    layout.until({"b": (0, 2), "c": (1, 2)})
    layout.join("a")
    wait_for(lambda: int(layout.nodes["b"].inner.num_nodes_waiting()) == 1, what="a waiting node")
    assert layout.nodes["b"].num_nodes_waiting() == 0
    leaving = cast("DynamicRendezvousHandler", layout.nodes["c"].inner)
    leaving._op_executor.run(_RendezvousExitOp(), leaving._get_deadline(timedelta(seconds=10)))
    wait_for(lambda: layout.nodes["b"].num_nodes_waiting() > 0, what="b is told")
    layout.join("b")
    wait_for(lambda: {layout.places.get("a"), layout.places.get("b")} == {(0, 2), (1, 2)}, what="a and b")


def test_a_spare_ends_with_the_job_and_without_an_error(layout: Meeting) -> None:
    for name in "ab":
        layout.join(name)
    layout.until({"a": (0, 2), "b": (1, 2)})
    layout.join("c")
    wait_for(lambda: int(layout.nodes["a"].inner.num_nodes_waiting()) == 1, what="the spare")
    layout.nodes["a"].may_close = True
    layout.nodes["a"].shutdown()
    layout.until({"a": (0, 2), "b": (1, 2), "c": "RendezvousGracefulExitError"})


def test_the_store_of_a_failed_job_stays_until_the_other_nodes_have_read_why(meeting: Meeting) -> None:
    for name in "ab":
        meeting.join(name)
    meeting.until({"a": (0, 2), "b": (1, 2)})
    for name in "ab":
        meeting.nodes[name].may_close = meeting.nodes[name].has_failed = True
    left = "flashckpt.job.meeting.left"
    first = threading.Thread(target=meeting.nodes["a"].shutdown)
    first.start()
    wait_for(lambda: meeting.store.check([left]) and b"1 " in meeting.store.get(left), what="a, which waits for b")
    assert first.is_alive()
    meeting.nodes["b"].shutdown()
    first.join(30)
    assert not first.is_alive()
    assert b"2 " in meeting.store.get(left)


@pytest.mark.parametrize("nnodes", ["3", "1:4", "2:5"])
def test_node_unit_that_does_not_divide_the_nodes_is_refused(script: str, nnodes: str) -> None:
    with pytest.raises(ConfigError, match=r"multiples of 2"):
        dlrun.main(
            [f"--nnodes={nnodes}", "--node-unit=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", script]
        )
