"""dlrun end to end, on scripts that know nothing of flashckpt: kills at every process, and what is said of them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from support import incidents
from support.dlrun import TRAIN, alive, dlrun, first_steps, processes_of, run_dlrun, script
from support.ranks import wait_for

pytestmark = pytest.mark.timeout(300)  # two cores that others use too


@pytest.fixture
def train(tmp_path: Path) -> Path:
    return script(tmp_path, TRAIN)


@pytest.mark.matrix
def test_zygote_killed_workers_live_on_and_the_next_life_has_a_new_one(tmp_path: Path, train: Path) -> None:
    """SIGKILL of the zygote costs no step; the restart after it forks from a new zygote."""
    with dlrun(tmp_path, "--nproc-per-node=2", "--max-restarts=1", train, tmp_path, 100000, 0.002) as launch:
        pids = launch.until(lambda: first_steps(tmp_path, 0, 2), "the first life")
        assert launch.says(f"started rank 0 pid {pids[0]}, rank 1 pid {pids[1]}")
        for rank, pid in pids.items():
            assert Path(f"/proc/{pid}/comm").read_text() == f"rank{rank}\n"
            assert Path(f"/proc/{pid}/cmdline").read_bytes().startswith(f"rank {rank}: {train}".encode()[:40])
        children = _children(launch.process.pid)
        zygote = (children - set(pids.values())).pop()
        assert Path(f"/proc/{zygote}/comm").read_text() == "dlrun-zygote\n"
        os.kill(zygote, signal.SIGKILL)
        wait_for(lambda: not alive(zygote), what="the zygote's end")
        assert all(alive(pid) for pid in pids.values())
        os.kill(pids[1], signal.SIGKILL)
        again = launch.until(lambda: first_steps(tmp_path, 1, 2), "the second life")
        assert _children(launch.process.pid) >= set(again.values())
    assert "new interpreters" not in launch.output


def test_agent_killed_workers_and_zygote_die_with_it(tmp_path: Path, train: Path) -> None:
    with dlrun(tmp_path, "--nproc-per-node=2", train, tmp_path, 100000, 0.002) as launch:
        pids = launch.until(lambda: first_steps(tmp_path, 0, 2), "the first life")
        everything = _children(launch.process.pid) | set(pids.values())
        os.kill(launch.process.pid, signal.SIGKILL)
        wait_for(lambda: not any(alive(pid) for pid in everything), what="the end of all children")
    wait_for(lambda: not processes_of(tmp_path), what="no process left")


def test_rank_dies_with_its_forked_children(tmp_path: Path) -> None:
    """A dataloader's workers do not outlive their killed rank: they would hold its memory and locks."""
    path = script(
        tmp_path,
        "import os, sys, time\n"
        "if os.fork() == 0: time.sleep(600)\n"
        "open(f'{sys.argv[1]}/up', 'w').close()\n"
        "time.sleep(600)\n",
    )
    with dlrun(tmp_path, "--max-restarts=0", path, tmp_path) as launch:
        launch.until((tmp_path / "up").exists, "the script")
        ranks = [pid for pid in processes_of(tmp_path) if os.getpgid(pid) == pid and pid != launch.process.pid]
        worker = next(pid for pid in ranks if _children(pid))
        os.kill(worker, signal.SIGKILL)
        assert launch.wait() == 1
    assert not processes_of(tmp_path)


def _children(pid: int) -> set[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return {int(word) for word in path.read_text().split()}


def test_exception_in_one_rank_is_named_with_its_traceback_and_without_record(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        "import os, torch.distributed as dist, torch\n"
        "dist.init_process_group('gloo')\n"
        "def explode():\n"
        "    raise ValueError('the learning rate is a fish')\n"
        "dist.barrier()\n"
        "if dist.get_rank() == 1: explode()\n"
        "dist.all_reduce(torch.ones(1))\n",
    )
    code, output = run_dlrun(tmp_path, "--nproc-per-node=3", "--max-restarts=0", path)
    assert code == 1
    assert output.count("rank 1 (local 1") == 1
    assert "failed first" in output
    assert output.count("  | ValueError: the learning rate is a fish") == 1
    assert len(incidents.said(output)) == 1
    assert "in explode" in output
    assert "run_worker" not in output
    assert "Connection" not in output


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("import sys; sys.exit(7)", "exit code 7"),
        ("import ctypes; ctypes.string_at(0)", "signal 11 (SIGSEGV, exit code 139)"),
        ("def f(:", "SyntaxError"),
    ],
)
def test_exit_is_described_in_words(tmp_path: Path, body: str, words: str) -> None:
    code, output = run_dlrun(tmp_path, "--max-restarts=0", script(tmp_path, body))
    assert (code, words in output) == (1, True), output


def test_missing_script_ends_at_once_and_names_it(tmp_path: Path) -> None:
    code, output = run_dlrun(tmp_path, "--max-restarts=0", tmp_path / "absent.py")
    assert code == 2
    assert "absent.py" in output
    assert "Traceback" not in output


def test_no_python_command_is_spawned_and_dlrun_says_why(tmp_path: Path) -> None:
    code, output = run_dlrun(tmp_path, "--nproc-per-node=2", "--no-python", "/bin/sh", "-c", "echo rank-$RANK")
    assert code == 0
    assert "rank-0" in output
    assert "rank-1" in output
    assert "--no-python: the command is not a Python script" in output


def test_module_redirects_tee_and_log_dir_work_as_in_torchrun(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "go.py").write_text(
        "import os, sys\nprint('out', os.environ['RANK'], sys.argv[1])\nprint('err', file=sys.stderr)\n"
        "assert __name__ == '__main__' and __spec__.name == 'pack.go'\n"
    )
    flags = ("--nproc_per_node=2", "--log-dir", tmp_path / "logs", "-r", "3", "--tee", "0:1", "-m", "pack.go", "word")
    code, output = run_dlrun(tmp_path, *flags)
    assert code == 0, output
    assert "[default0]:out 0 word" in output
    assert "out 1 word" not in output
    logs = sorted(
        str(path.relative_to(tmp_path / "logs")).split("/", 1)[1] for path in tmp_path.glob("logs/*/*/*/*.log")
    )
    assert logs == [f"attempt_0/{rank}/{name}.log" for rank in range(2) for name in ("stderr", "stdout")]
    assert next(tmp_path.glob("logs/*/attempt_0/1/stdout.log")).read_text() == "out 1 word\n"


def test_failing_ranks_last_log_lines_are_shown_and_every_life_has_its_logs(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        "import os, sys\nfor i in range(30): print('line', i, file=sys.stderr)\n"
        "sys.exit(3 if os.environ['FLASHCKPT_RESTART'] == '0' else 0)\n",
    )
    flags = ("--max-restarts=1", "--log-dir", tmp_path / "logs", "-r", "2")
    code, output = run_dlrun(tmp_path, *flags, path)
    assert code == 0, output
    assert "> line 29" in output
    assert "> line 10" in output
    assert "> line 9\n" not in output
    assert {path.name for path in tmp_path.glob("logs/*/attempt_*")} == {"attempt_0", "attempt_1"}


def test_sigterm_reaches_scripts_that_know_nothing_of_flashckpt(tmp_path: Path) -> None:
    """Without a job directory dlrun forwards the signal as torchrun does, and waits for the handlers."""
    path = script(
        tmp_path,
        "import signal, sys, time\n"
        "def stop(*_):\n    open(f'{sys.argv[1]}/handled', 'w').close(); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop)\nopen(f'{sys.argv[1]}/up', 'w').close()\ntime.sleep(600)\n",
    )
    with dlrun(tmp_path, path, tmp_path) as launch:
        launch.until((tmp_path / "up").exists, "the script")
        launch.process.send_signal(signal.SIGTERM)
        assert launch.wait() == 128 + signal.SIGTERM
    assert (tmp_path / "handled").exists()


def test_pet_variables_and_unknown_flags(tmp_path: Path) -> None:
    path = script(tmp_path, "import os; os.write(1, f'world {os.environ[\"WORLD_SIZE\"]}\\n'.encode())")
    code, output = run_dlrun(tmp_path, path, env={"PET_NPROC_PER_NODE": "2"})
    assert code == 0
    assert output.count("world 2") == 2
    code, output = run_dlrun(tmp_path, "--nproc-per-nod3", "2", path)
    assert code == 2
    assert "--nproc-per-nod3" in output
