"""Settings that must hold before numpy or torch are imported, and the leak check every test gets."""

from __future__ import annotations

import os

# One thread: ranks are forked from this process, and a libgomp pool does not survive a fork.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import contextlib
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from support import warm
from support.ranks import wait_for

hypothesis.settings.register_profile("flashckpt", deadline=None)  # no test asserts a time
hypothesis.settings.load_profile("flashckpt")
pytest_plugins = ("support.workers", "support.shares", "support.s3")


@pytest.fixture
def shm_dir() -> Iterator[Path]:
    """A memory directory of this test's own, on tmpfs; fails the test if something that still runs keeps it."""
    given = os.environ.get("GPU_TEST_SHM", "/dev/shm")  # gpu.sh: one that has room, and is removed whatever happens
    base = Path(given) if os.access(given, os.W_OK) else Path(tempfile.gettempdir())
    path = Path(tempfile.mkdtemp(prefix="flashckpt-test-", dir=base))
    yield path

    def is_gone() -> bool:  # a daemon that ends may still write while it is removed
        shutil.rmtree(path, ignore_errors=True)
        return not path.exists()

    wait_for(is_gone, what=f"the end of all that writes into {path}")


@pytest.fixture(scope="session", autouse=True)
def _own_temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What torch leaves in the folder for temporary files goes with the tests: sockets, log folders.

    Not with each of them: servers that a whole file uses keep theirs there.
    """
    tmp_path_factory.getbasetemp()  # of all tests: pytest makes it at its first use
    before = tempfile.tempdir
    tempfile.tempdir = tempfile.mkdtemp(prefix="fk-")  # short: paths of sockets are
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", tempfile.tempdir)  # of the programs that tests start
        yield
    shutil.rmtree(tempfile.tempdir, ignore_errors=True)
    tempfile.tempdir = before


@pytest.fixture(autouse=True)
def _own_memory_tier(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test touches the machine's real memory tier, and none inherits the variables of a launcher or of another test."""
    monkeypatch.setenv("FLASHCKPT_SHM_DIR", str(shm_dir))
    for name in [key for key in os.environ if key.startswith("FLASHCKPT_") and key != "FLASHCKPT_SHM_DIR"]:
        monkeypatch.delenv(name)
    with contextlib.suppress(KeyError):
        monkeypatch.delenv("RANK")
    yield
    # What the test has set: fixtures of the next module are made before this one clears anything.
    for name in [key for key in os.environ if key.startswith("FLASHCKPT_")]:
        del os.environ[name]


for number, usual in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
    if signal.getsignal(number) is signal.SIG_IGN:  # inherited from nohup, or from a shell without job control
        signal.signal(number, usual)


@pytest.fixture(autouse=True)
def _signals_stay() -> Iterator[None]:
    """A program that a test ran here (a daemon's `main`) leaves no handler to the next file of the same worker."""
    numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        if handler is not None and signal.getsignal(number) != handler:
            signal.signal(number, handler)


@pytest.fixture(params=["python", "the best"])
def copied_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test with memory copied in Python, and by what flashckpt.native chooses here."""
    if request.param == "python":
        monkeypatch.setenv("FLASHCKPT_COPY", "python")
    return str(request.param)


def pytest_sessionfinish() -> None:
    """Not a fixture of the session: a worker makes those anew for each file, and this interpreter takes seconds."""
    warm.stop()
