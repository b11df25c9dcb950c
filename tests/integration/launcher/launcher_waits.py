"""What dlrun and its ranks wait for, and for how long: storage that comes back, processes that are stopped or hang."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest
from support.dlrun import alive, dlrun, processes_of, run_dlrun
from support.proxy import Proxy
from support.s3 import moto_server

from flashckpt.errors import RESUME_EXIT_CODE, RootError
from flashckpt.shm.job_directory import memory_root

pytestmark = pytest.mark.timeout(300)

ON_S3 = """
import json, sys, torch, torch.distributed as dist
from flashckpt import Checkpointer
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(3, 3)
optimizer = torch.optim.AdamW(model.parameters())
ckpt = Checkpointer(f"s3://{sys.argv[1]}/run", persist_every=2, snapshot_every=1, storage_options=json.loads(sys.argv[2]))
ckpt.track(model=model, optimizer=optimizer, replicated_over="world")
report = ckpt.restore()
for step in range((report.step if report else 0) + 1, int(sys.argv[3]) + 1):
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    ckpt.step(step)
ckpt.wait()
ckpt.close()
print("from", report.step if report else None)
"""


def test_storage_that_comes_back_is_waited_for_and_a_bucket_that_is_not_there_is_not(tmp_path: Path) -> None:
    """A start after all memory was lost, while nobody listens at the endpoint, restores what is on it."""
    script = tmp_path / "train.py"
    script.write_text(ON_S3)
    flags = ("--nproc-per-node=2", "--max-restarts=0", script)
    with moto_server() as server, Proxy(server.endpoint) as proxy:
        options = json.dumps(server.options(retries=1, endpoint_url=proxy.endpoint))
        code, output = run_dlrun(tmp_path, *flags, "no-such-bucket", options, 2)
        assert (code, output.count("started rank 0")) == (RootError.exit_code, 1), output
        assert "trying again" not in output
        code, output = run_dlrun(tmp_path, *flags, server.bucket, options, 2)
        assert code == 0, output
        proxy.stop()
        memory = {"FLASHCKPT_SHM_DIR": str(tmp_path / "another-machine")}
        with dlrun(tmp_path, *flags, server.bucket, options, 4, env=memory) as launch:
            launch.until(partial(launch.says, "storage cannot be reached, trying again"), "the wait")
            proxy.start()
            assert launch.wait() == 0, launch.output
        assert launch.says("from 2")


EARLY = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(100):
    dist.all_reduce(torch.ones(1))
    if step == 20 and dist.get_rank() == 1:
        os._exit(0)
"""


def test_a_rank_that_leaves_with_0_is_named_and_not_those_that_missed_it(tmp_path: Path) -> None:
    (tmp_path / "early.py").write_text(EARLY)
    code, output = run_dlrun(tmp_path, "--nproc-per-node=3", "--max-restarts=0", tmp_path / "early.py")
    assert code == 1, output
    assert "rank 1 (local 1, pid" in output
    assert "failed first: it ended with exit code 0 while its peers still needed it" in output


@pytest.mark.parametrize(
    ("words", "starts"),
    [(["nope.py"], 0), (["-m", "nope"], 0), (["args.py", "--unknown"], 1), (["--no-python", "./missing"], 0)],
)
def test_a_wrong_command_line_ends_at_once(tmp_path: Path, words: list[str], starts: int) -> None:
    (tmp_path / "args.py").write_text("import argparse; argparse.ArgumentParser().parse_args()")
    code, output = run_dlrun(tmp_path, "--nproc-per-node=2", *words)
    assert (code, output.count("started rank 0")) == (2, starts), output


WITH_WORKERS = """
import os, sys, torch, torch.distributed as dist
from flashckpt import Checkpointer
from flashckpt.sampler import ElasticSampler

class Slow(torch.utils.data.Dataset):
    def __len__(self): return 100000
    def __getitem__(self, index): return torch.tensor([float(index)])

def evaluate(ckpt, folder):
    with ckpt.paused():
        for _ in torch.utils.data.DataLoader(Slow(), batch_size=1, num_workers=1):
            open(f"{folder}/evaluates{os.environ['RANK']}", "w").close()
            if os.path.exists(f"{folder}/evaluated"):
                break

def main(folder, last, how="fork"):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rank, data = dist.get_rank(), Slow()
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    sampler = ElasticSampler(len(data), global_batch_size=8, dp_rank=rank, dp_size=dist.get_world_size(), seed=1)
    loader = torch.utils.data.DataLoader(
        data, batch_size=8 // dist.get_world_size(), sampler=sampler, num_workers=2, multiprocessing_context=how.partition(" ")[0]
    )
    ckpt = Checkpointer(folder + "/root", snapshot_every=7, persist_every=1000)
    ckpt.track(model=model, optimizer=optimizer, sampler=sampler)
    report = ckpt.restore()
    step = report.step if report else 0
    for batch in loader:
        step += 1
        model(batch).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step(step)
        with open(f"{folder}/samples{rank}", "a") as file:
            file.write(f"{step} {sorted(int(x) for x in batch)}\\n")
        if ckpt.should_stop or step >= last:
            break
        if how.endswith("evaluates") and step == 12:
            evaluate(ckpt, folder)
    ckpt.wait()
    ckpt.close()

if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
"""


def signal_all(pids: Iterable[int], name: str) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, getattr(signal, name))


def lines(folder: Path, rank: int) -> list[str]:
    try:
        return (folder / f"samples{rank}").read_text().splitlines()
    except OSError:
        return []


@pytest.mark.parametrize(
    ("name", "order", "how"),
    [
        ("SIGTERM", "as started", "fork evaluates"),
        ("SIGUSR1", "the last first", "spawn"),
        ("SIGINT", "the agent many steps later", "fork"),
    ],
)
def test_a_signal_to_every_process_of_a_job_is_an_agreed_stop(tmp_path: Path, name: str, order: str, how: str) -> None:
    """dlrun, zygote, ranks, their loader workers and the persister: all ranks end after one step, and no sample is lost."""
    (tmp_path / "train.py").write_text(WITH_WORKERS)
    flags = ("--nproc-per-node=2", "--max-restarts=0", tmp_path / "train.py", tmp_path)
    is_evaluating = how.endswith("evaluates")
    least = 1 + 1 + 2 + 4 + 1 + 2 * is_evaluating  # dlrun, zygote, ranks, loader workers, persister

    def ready() -> list[int]:
        """The processes in the order of their pids: the persister may start later than ten steps take."""
        found = sorted({**processes_of(tmp_path), **processes_of(memory_root())})
        is_there = len(lines(tmp_path, 0)) > 10 and len(found) >= least
        begun = all((tmp_path / f"evaluates{rank}").exists() >= is_evaluating for rank in range(2))
        return found if is_there and begun else []

    with dlrun(tmp_path, *flags, 100000, how) as launch:
        found: list[int] = launch.until(ready, "some steps of a whole job")
        found.sort(reverse=order == "the last first")
        if order == "the agent many steps later":
            found.remove(launch.process.pid)
        signal_all(found, name)
        if launch.process.pid not in found:
            reached = len(lines(tmp_path, 0))
            launch.until(lambda: len(lines(tmp_path, 0)) > reached + 20, "steps for which workers make data")
            launch.process.send_signal(getattr(signal, name))
        launch.until(partial(launch.says, "all ranks stop after step"), "the agreement")
        (tmp_path / "evaluated").touch()
        assert launch.wait() == RESUME_EXIT_CODE, launch.output
    (stopped,) = {int(lines(tmp_path, rank)[-1].split()[0]) for rank in range(2)}
    code, output = run_dlrun(tmp_path, *flags, stopped + 3)
    assert code == 0, output
    for rank in range(2):
        steps = [int(line.split()[0]) for line in lines(tmp_path, rank)]
        assert steps == list(range(1, stopped + 4))  # none twice: what was stopped after was kept
    samples = [int(one) for rank in range(2) for line in lines(tmp_path, rank) for one in re.findall(r"\d+", line)[1:]]
    assert len(samples) == len(set(samples)) == 8 * (stopped + 3)


def test_a_signal_to_one_rank_alone_ends_it_and_loader_workers_end_with_it(tmp_path: Path) -> None:
    """Twice, so that the rank does not wait for the agent: a failure as any other, restarted from memory."""
    (tmp_path / "train.py").write_text(WITH_WORKERS)
    with dlrun(tmp_path, "--nproc-per-node=2", tmp_path / "train.py", tmp_path, 100000) as launch:
        launch.until(lambda: len(lines(tmp_path, 0)) > 10, "some steps")
        (pid,) = re.findall(r"rank 1 pid (\d+)", launch.output)

        def ends() -> bool:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGTERM)
            return not alive(int(pid))

        launch.until(ends, "the end of the rank")
        launch.until(lambda: launch.output.count("started rank") == 2, "the restart")
        reached = len(lines(tmp_path, 0))
        launch.until(lambda: len(lines(tmp_path, 0)) > reached + 3, "more steps")
        launch.process.send_signal(signal.SIGTERM)
        assert launch.wait() == RESUME_EXIT_CODE, launch.output
    assert "rank 1 (local 1" in launch.output


def test_a_rank_that_a_signal_ends_makes_no_failure_of_a_stop(tmp_path: Path) -> None:
    """The script has chosen to end at once: the job stops all the same, and continues from the newest common snapshot."""
    text = WITH_WORKERS.replace(
        "    step = report", "    import signal; signal.signal(signal.SIGTERM, signal.SIG_DFL)\n    step = report"
    )
    (tmp_path / "train.py").write_text(text)
    flags = ("--nproc-per-node=2", "--max-restarts=5", tmp_path / "train.py", tmp_path)
    with dlrun(tmp_path, *flags, 100000) as launch:
        launch.until(lambda: len(lines(tmp_path, 0)) > 10, "some steps")
        signal_all(processes_of(tmp_path), "SIGTERM")
        assert launch.wait() == RESUME_EXIT_CODE, launch.output
    assert launch.says("newest common snapshot is kept")
    assert launch.output.count("started rank") == 1
    code, output = run_dlrun(tmp_path, *flags, 30)
    assert code == 0, output
    for rank in range(2):
        seen = lines(tmp_path, rank)
        assert len(dict(line.split(" ", 1) for line in seen)) == len(set(seen))  # what is trained again is the same


PHASED = """
import os, sys, time, torch, torch.distributed as dist
from flashckpt import Checkpointer

folder, life = sys.argv[1], os.environ["FLASHCKPT_RESTART"]

def reach(phase):
    open(f"{folder}/{life}-{phase}-{os.environ['RANK']}", "w").write(str(os.getpid()))
    while os.environ["RANK"] == "1" and os.path.exists(f"{folder}/hold-{life}-{phase}"):
        time.sleep(0.01)

reach("start")
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(3, 3)
optimizer = torch.optim.AdamW(model.parameters())
ckpt = Checkpointer(folder + "/root", snapshot_every=1, persist_every=1000)
ckpt.track(model=model, optimizer=optimizer)
reach("before restore")
report = ckpt.restore()
reach("restored")
for step in range((report.step if report else 0) + 1, 10**6):
    dist.all_reduce(torch.ones(1))
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    ckpt.step(step)
    if step % 10 == 0:
        reach("training")
    if step % 10 == 5:
        with ckpt.paused():
            reach("evaluation")
            dist.all_reduce(torch.ones(1))
    if ckpt.should_stop:
        break
    time.sleep(0.005)
ckpt.wait()
ckpt.close()
"""


def there(folder: Path, name: str) -> int:
    """The pid that a rank has left when it reached a phase; 0 until then."""
    try:
        return int((folder / name).read_text() or 0)
    except OSError:
        return 0


@pytest.mark.parametrize("life", [0, 1])
@pytest.mark.parametrize("phase", ["start", "before restore", "restored", "training", "evaluation"])
def test_a_rank_that_is_stopped_in_any_phase_is_named_and_the_job_goes_on(
    tmp_path: Path, phase: str, life: int
) -> None:
    (tmp_path / "train.py").write_text(PHASED)
    (tmp_path / f"hold-{life}-{phase}").touch()
    flags = ("--nproc-per-node=2", "--hang-timeout=2", tmp_path / "train.py", tmp_path)
    with dlrun(tmp_path, *flags) as launch:
        if life:
            os.kill(launch.until(partial(there, tmp_path, "0-training-0"), "a first life"), signal.SIGKILL)
        pid = launch.until(partial(there, tmp_path, f"{life}-{phase}-1"), "the phase")
        os.kill(pid, signal.SIGSTOP)
        (tmp_path / f"hold-{life}-{phase}").unlink()
        launch.until(partial(there, tmp_path, f"{life + 1}-training-0"), "the next life")
        launch.process.send_signal(signal.SIGTERM)
        assert launch.wait() == RESUME_EXIT_CODE, launch.output
    assert "look at rank 1" in launch.output
    assert "state T (stopped)" in launch.output


def test_a_restart_in_which_a_rank_waits_for_ever_is_ended_and_named(tmp_path: Path) -> None:
    """Not stopped, and nothing to see of it but that nobody does anything, in a start that took seconds before."""
    (tmp_path / "train.py").write_text(PHASED)
    (tmp_path / "hold-1-before restore").touch()
    text = (tmp_path / "train.py").read_text().replace("time.sleep(0.01)", "time.sleep(10000)")
    (tmp_path / "train.py").write_text(text)
    with dlrun(tmp_path, "--nproc-per-node=2", "--hang-timeout=2", tmp_path / "train.py", tmp_path) as launch:
        os.kill(launch.until(partial(there, tmp_path, "0-training-0"), "a first life"), signal.SIGKILL)
        launch.until(partial(there, tmp_path, "2-training-0"), "the life after the one that waited")
        launch.process.send_signal(signal.SIGTERM)
        assert launch.wait() == RESUME_EXIT_CODE, launch.output
    assert launch.says("no rank has done anything for")


@pytest.mark.parametrize("first", [True, False])
def test_a_stopped_zygote_is_named_and_replaced(tmp_path: Path, *, first: bool) -> None:
    """Before the first ranks are forked from it (it imports then), and at a restart."""
    (tmp_path / "train.py").write_text(PHASED)
    with dlrun(tmp_path, "--nproc-per-node=2", tmp_path / "train.py", tmp_path, fresh=first) as launch:
        pid = 0 if first else launch.until(partial(there, tmp_path, "0-training-0"), "a first life")
        zygotes = launch.until(
            lambda: [pid for pid, line in processes_of(tmp_path).items() if "dlrun zygote" in line], "it"
        )
        os.kill(zygotes[0], signal.SIGSTOP)
        if pid:
            os.kill(pid, signal.SIGKILL)
        launch.until(partial(there, tmp_path, f"{0 if first else 1}-training-0"), "training")
        launch.process.send_signal(signal.SIGTERM)
        assert launch.wait() == RESUME_EXIT_CODE, launch.output
    assert re.search(rf"the zygote, pid {zygotes[0]}, does not answer \(it is stopped", launch.output), launch.output
