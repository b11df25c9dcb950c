"""What the machines of nfs.py are asked to do: each function is called there, with JSON values (agent.py)."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flashckpt.errors import ObjectMissingError
from flashckpt.storage.posix import PosixStore

MOUNTED = Path("/run/nfs")


def shell(command: str) -> tuple[int, str]:
    """Run a command; return its code and what it says."""
    done = subprocess.run(["bash", "-c", command], check=False, capture_output=True, text=True)
    return done.returncode, (done.stdout + done.stderr)[-10_000:]


def mount(version: str, client: int, options: str) -> None:
    """Mount the server's export, in place of an earlier mount."""
    MOUNTED.mkdir(exist_ok=True)
    shell("tc qdisc del dev vec0 ingress")
    if MOUNTED.is_mount():
        subprocess.run(["umount", "-l", str(MOUNTED)], check=True)
    place, more = ("/run/disk/export", ",nolock,port=2049,mountport=20048") if version == "3" else ("/", "")
    options = f"vers={version},nosharecache{more}{options}"
    subprocess.run(["mount", "-t", "nfs", "-o", options, f"10.0.{client}.1:{place}", str(MOUNTED)], check=True)


def conformance(folder: str) -> tuple[int, str]:
    """Run the tests that every store passes, in a folder of the mount."""
    options = ["-q", "--color=no", "-p", "no:cacheprovider", f"--basetemp={MOUNTED / folder}"]
    command = [sys.executable, "-m", "pytest", *options, "tests/unit/storage/test_store.py", "-k", "posix"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return done.returncode, done.stdout[-5000:]


def written(folder: str, nbytes: int) -> dict[str, int]:
    """Write one large object and compare it; return how often each procedure was asked of the server to write it."""
    store, data = store_in(folder), os.urandom(nbytes)
    before = _procedures()
    store.put_object("pack", [memoryview(data)], nbytes)
    asked = {name: count - before.get(name, 0) for name, count in _procedures().items()}
    for store.past_cache in (False, True):
        out = bytearray(nbytes)
        store.get_range("pack", 0, memoryview(out))
        assert out == data
    return asked


def _procedures() -> dict[str, int]:
    (mine,) = re.findall(
        rf"mounted on {MOUNTED} with .*?(?=\ndevice |\Z)", Path("/proc/self/mountstats").read_text(), re.DOTALL
    )
    return {name: int(count) for name, count in re.findall(r"^\s*([A-Z_]+): (\d+) ", mine, re.MULTILINE)}


def store_in(folder: str) -> PosixStore:
    return PosixStore(MOUNTED / folder)


def there(folder: str, key: str) -> list[bool]:
    """Return what each way of looking for an object finds."""
    store = store_in(folder)

    def got() -> bool:
        with contextlib.suppress(ObjectMissingError):
            return bool(store.get(key))
        return False

    prefix = key.rpartition("/")[0]
    return [store.head(key) is not None, got(), key in [one.key for one in store.list(f"{prefix}/")]]


def put(folder: str, key: str) -> None:
    store_in(folder).put(key, b"x")


def delete(folder: str, *keys: str) -> None:
    store_in(folder).delete_many(keys)


def sweep(folder: str) -> list[str]:
    """Remove what a job that has ended left; its processes are zombies here, where the first process reaps none."""
    return store_in(folder).sweep(older_than_s=0)


def claims(folder: str, me: str, count: int) -> list[str]:
    """Try to create so many objects that another machine tries to create too; return those that this one created."""
    store = store_in(folder)
    return [key for number in range(count) if store.put_if_absent(key := f"claim-{number}", me.encode())]


def claimants(folder: str) -> dict[str, str]:
    store = store_in(folder)
    return {one.key: store.get(one.key).decode() for one in store.list("claim-")}


def part(folder: str, rank: int, steps: list[int]) -> None:
    """Persist this rank's half of some snapshots, without a commit."""
    from support.slots import make_pin, shard

    from flashckpt.checkpoint.root_records import prefix_of
    from flashckpt.checkpoint.writer import persist_slot

    for step in steps:
        half = shard("weight", (2, 1000), offsets=(rank, 0), lengths=(1, 1000))
        values = {"step": step, f"rng@rank{rank}": b"state"}
        pin = make_pin([half], rank=rank, world_size=2, step=step, values=values)
        persist_slot(pin, store_in(folder), prefix_of(1, step))


def commits(folder: str, steps: list[int]) -> list[int]:
    """Commit the checkpoints; return the steps whose MANIFEST this machine created."""
    from flashckpt.checkpoint.root_records import prefix_of
    from flashckpt.checkpoint.writer import commit

    return [step for step in steps if commit(store_in(folder), prefix_of(1, step), [0, 1])]


def checkpoints(folder: str) -> list[int]:
    """Return the steps of all checkpoints, which are whole."""
    from flashckpt.checkpoint.catalog import list_checkpoints
    from flashckpt.commands.verify import verify_checkpoint

    store = store_in(folder)
    infos = list_checkpoints(store, damaged=True, whole=True)
    for info in infos:
        assert not verify_checkpoint(store, info, lambda _: None)["damaged"]
    return sorted(info.step for info in infos)


# -- calls that wait in the middle, until the host has done something ------------------------------------

_running: list[tuple[threading.Thread, list[Any]]] = []
_waits, _may_go_on = threading.Event(), threading.Event()


def _begin(work: Callable[[], object]) -> None:
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(work())
        except Exception as error:  # noqa: BLE001 -- the host compares it
            result.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=run)
    _running.append((thread, result))
    thread.start()


def _begin_slowly(work: Callable[[], object]) -> None:
    """Begin, and return when it waits."""
    _waits.clear()
    _may_go_on.clear()
    _begin(work)
    assert _waits.wait(60)


def _pause() -> None:
    _waits.set()
    _may_go_on.wait(60)


def finished() -> Any:
    """Let it go on; return what it returned, or the text of its error."""
    thread, result = _running.pop()
    _may_go_on.set()
    thread.join(100)
    return result[0] if result else "it does not end"


@contextlib.contextmanager
def _replaced(owner: Any, name: str, call: Callable[..., Any]) -> Iterator[None]:
    real = getattr(owner, name)
    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, real)


def publish_unanswered(folder: str, what: str) -> None:
    """Publish something, and hear no answer of the server from the call on that publishes it; `answered` goes on."""
    owner, name = (os, "link") if what == "claim" else (Path, "rename")
    real, calls = getattr(owner, name), [0]

    def cutting(*arguments: Any) -> None:
        calls[0] += 1
        if calls[0] == (2 if what == "export over a folder" else 1):  # the first puts the old folder aside
            _drop_answers(*arguments)
        real(*arguments)

    def work() -> list[Any]:
        store = store_in(folder)
        assert store.is_conditional
        with _replaced(owner, name, cutting):
            match what:
                case "claim":
                    return [store.put_if_absent("claim", b"mine"), store.get("claim").decode(), calls[0]]
                case "object":
                    store.put("object", b"mine")
                    return [True, store.get("object").decode(), calls[0]]
        return [export(folder, "new", instead=_replaced(owner, name, cutting)), "new", calls[0]]

    _begin(work)


def answered() -> Any:
    shell("tc qdisc del dev vec0 ingress")
    return finished()


def _drop_answers(*paths: Any) -> None:
    """Let the next call that changes these names be the first that is not answered: what it asks before is known already."""
    subprocess.run(["tc", "qdisc", "add", "dev", "vec0", "handle", "ffff:", "ingress"], check=True)
    for path in paths:
        os.access(Path(path).parent, os.W_OK | os.X_OK)
        os.access(path, os.R_OK | os.W_OK)
    subprocess.run(["tc", "filter", "add", "dev", "vec0", "parent", "ffff:", "matchall", "action", "drop"], check=True)


def export(folder: str, content: str, instead: contextlib.AbstractContextManager[None] | None = None) -> bool:
    """Write a folder as `flashckpt export --force` does; return whether it is there, whole."""
    from flashckpt.interop.target import replacing

    path = MOUNTED / folder / "exported"
    with instead or contextlib.nullcontext(), replacing(path, nbytes=10, force=True, is_ours=lambda _: True) as new:
        new.mkdir()
        (new / "file").write_text(content)
    return (path / "file").read_text() == content


def exchanges(folder: str) -> bool:
    """Return whether two names change places in one step here."""
    from flashckpt.interop.target import _exchange

    one, two = MOUNTED / folder / "one", MOUNTED / folder / "two"
    one.mkdir(parents=True)
    two.mkdir()
    return _exchange(one, two)


def list_slowly(folder: str, prefix: str) -> None:
    """List, and wait between the opening of the folder and its first name."""
    real = os.scandir

    def waiting(path: str) -> Any:
        found = real(path)
        if str(path).endswith(prefix):
            _pause()
        return found

    _begin_slowly(lambda: _looked_at(folder, prefix, waiting))


def _looked_at(folder: str, prefix: str, scandir: Callable[[str], Any]) -> list[Any]:
    with _replaced(os, "scandir", scandir):
        store = store_in(folder)
        return [[one.key for one in store.list(f"{prefix}/")], store.folders(f"{prefix}/")]


def read_slowly(folder: str, key: str, nbytes: int) -> None:
    """Read an object, and wait between its opening and its first byte."""
    real = os.preadv

    def waiting(*arguments: Any) -> int:
        _pause()
        return real(*arguments)

    def work() -> str:
        with _replaced(os, "preadv", waiting):
            store = store_in(folder)
            store.past_cache = True  # opens it once
            store.get_range(key, 0, memoryview(bytearray(nbytes)))
        return "read"

    _begin_slowly(work)


def delete_while_open(folder: str, key: str) -> list[str]:
    """Delete a folder while a file of it is open; return what is listed of it meanwhile."""
    store = store_in(folder)
    with (MOUNTED / folder / key).open("rb"):
        store.delete_many([one.key for one in store.list()])
        kept = [one.key for one in store.list()]
        store.delete_many(kept)
    return kept


# -- a job -----------------------------------------------------------------------------------------------

_WIDTH = 1400  # 24 MB with the optimizer's moments
_job: dict[str, Any] = {}


def start_job(folder: str) -> None:
    """Begin a training loop whose checkpoints go to the mount."""
    import torch

    from flashckpt import Checkpointer

    os.environ["FLASHCKPT_DAEMON_LINGER"] = "0.2"
    model = torch.nn.Linear(_WIDTH, _WIDTH)
    optimizer = torch.optim.AdamW(model.parameters())
    ckpt = Checkpointer(str(MOUNTED / folder), snapshot_every=1, persist_every=2, keep_last=2, job=folder)
    ckpt.track(model=model, optimizer=optimizer)
    ckpt.restore()
    _job.update(model=model, optimizer=optimizer, ckpt=ckpt, folder=folder)


def train(*steps: int) -> None:
    import torch

    for step in steps:
        _job["model"](torch.ones(2, _WIDTH)).square().sum().backward()
        _job["optimizer"].step()
        _job["optimizer"].zero_grad()
        _job["ckpt"].step(step)


def wait(seconds: float) -> str:
    """Wait until the newest persist is durable; return why it is not."""
    from flashckpt.errors import PersistError

    try:
        _job["ckpt"].wait(seconds)
    except PersistError as error:
        return str(error)
    return ""


def told() -> dict[str, Any]:
    """Return what `flashckpt status` says of the job, and how often its daemon's log says that a persist failed."""
    from flashckpt.commands.status import describe
    from flashckpt.shm.job_directory import JobDirectory

    directory = JobDirectory.open(_job["folder"], create=False)
    failed = (directory.path / "daemon.log").read_text().count("persist failed")
    return {**describe(directory), "failed": failed}


def fence() -> None:
    """Wait until the last snapshot in memory is whole."""
    _job["ckpt"].fence()


def _words_of(pid: int) -> bytes:
    """Return the command line of a process; of one that has ended, a zombie too, b""."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def finish() -> list[str]:
    """End the job and its daemon, whose last words go to the root; return what is left of it in memory."""
    from support.ranks import wait_for

    from flashckpt.shm.job_directory import JobDirectory, memory_root

    status = JobDirectory.open(_job["folder"], create=False).read_status()
    assert status is not None
    _job["ckpt"].close()
    wait_for(lambda: not any(memory_root().iterdir()), what="the memory to be given back")
    wait_for(lambda: not _words_of(status.pid), what="the daemon to end")
    return sorted(one.name for one in memory_root().iterdir())


def restored() -> int:
    """Restore into another model, which is the live one then, bit for bit; return the step."""
    import torch

    from flashckpt import Checkpointer

    other = torch.nn.Linear(_WIDTH, _WIDTH)
    again = torch.optim.AdamW(other.parameters())
    reader = Checkpointer.readonly(str(MOUNTED / _job["folder"]))
    reader.track(model=other, optimizer=again)
    report = reader.restore()
    for one, two in zip(_job["model"].parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
        assert torch.equal(_job["optimizer"].state[one]["exp_avg"], again.state[two]["exp_avg"])
    return int(report.step)


def verify(folder: str) -> tuple[int, str]:
    """Run the command, in this process: another interpreter would import everything again, which takes long here."""
    from flashckpt.cli.entry import main

    said, before = io.StringIO(), sys.argv
    sys.argv = ["flashckpt", "verify", str(MOUNTED / folder)]
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            main()
    except SystemExit as done:
        return int(done.code or 0), said.getvalue()
    finally:
        sys.argv = before
    return 0, said.getvalue()
