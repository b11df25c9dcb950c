"""`pytest --workers N` shows what a serial run shows, loses no test, and outlives a test process that dies."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.paths import TESTS
from support.ranks import wait_for

SUITE = {
    "test_one.py": """
        import os, pytest
        @pytest.fixture(scope="module")
        def once():
            yield os.getpid()
            print("fixture torn down")
        def test_first(once): assert once == os.getpid()
        def test_second(once): assert once == os.getpid()
        @pytest.mark.skip(reason="not today")
        def test_skipped(): pass
        """,
    "test_two.py": """
        import os, pytest
        def test_fails():
            print("seen in the report")
            assert [1, 2] == [1, 3]
        @pytest.mark.xfail(strict=True)
        def test_expected(): assert False
        def test_in_a_worker(): assert os.environ["COLLECTOR"] == str(os.getppid())
        """,
    "test_three.py": """
        import os, signal
        def test_before(): pass
        def test_dies(): os.kill(os.getpid(), signal.SIGKILL)
        def test_after(): pass
        """,
    "conftest.py": """
        import os
        os.environ["COLLECTOR"] = str(os.getpid())
        """,
}


PYTEST = (  # whatever started this process may have had SIGINT ignored
    "import signal, sys, pytest; signal.signal(signal.SIGINT, signal.default_int_handler);"
    "sys.exit(pytest.main(['-p', 'support.workers', '-ra', *sys.argv[1:]]))"
)


def start(folder: Path, *arguments: str, files: Any = SUITE) -> subprocess.Popen[str]:
    for name in files:
        lines = SUITE[name].strip("\n").splitlines()
        (folder / name).write_text("\n".join(line[8:] for line in lines) + "\n")
    (folder / "pytest.ini").touch()
    return subprocess.Popen(
        [sys.executable, "-c", PYTEST, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run(folder: Path, *arguments: str, files: Any = SUITE) -> tuple[int, str]:
    process = start(folder, *arguments, files=files)
    output, _ = process.communicate(timeout=60)
    return process.returncode, output


def test_a_death_a_failure_and_the_rest_are_all_told(tmp_path: Path) -> None:
    code, output = run(tmp_path, "--workers", "2")
    assert code == 1
    assert "2 failed, 5 passed, 1 skipped, 1 xfailed" in output
    assert "FAILED test_three.py::test_dies" in output
    assert "the test process ended (SIGKILL) in this test" in output
    assert "assert [1, 2] == [1, 3]" in output
    assert "seen in the report" in output
    assert "SKIPPED [1] test_one.py" in output
    assert re.search(r"^test_one.py \.\.s", output, re.MULTILINE)  # a file's results stand together


def test_what_failed_is_remembered(tmp_path: Path) -> None:
    run(tmp_path, "--workers", "3", files=["conftest.py", "test_one.py", "test_two.py"])
    code, output = run(tmp_path, "--last-failed", files=["test_one.py"])
    assert (code, "1 failed" in output) == (1, True), output


def test_all_passed_ends_with_0(tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text("def test_passes(): pass\n")
    code, output = run(tmp_path, "--workers", "2", files=["test_one.py"])
    assert (code, "3 passed, 1 skipped" in output) == (0, True), output


def test_the_first_failure_stops_the_other_workers(tmp_path: Path) -> None:
    (tmp_path / "test_waits.py").write_text("import signal\ndef test_waits(): signal.pause()\n")
    code, output = run(tmp_path, "--workers", "2", "-x", files=["conftest.py", "test_two.py"])
    assert (code, "stopping after 1 failures" in output) == (1, True), output


CLEANS_UP = """
import signal, time
from pathlib import Path
def test_{name}():
    Path("{name}").touch()
    try: signal.pause()
    finally:
        time.sleep(0.3)  # the second signal comes meanwhile
        Path("{name}").unlink()
"""


def test_ctrl_c_lets_every_worker_clean_up(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"test_{name}.py").write_text(CLEANS_UP.format(name=name))
    process = start(tmp_path, "--workers", "2", files=[])
    wait_for(lambda: (tmp_path / "a").exists() and (tmp_path / "b").exists(), what="both tests to run")
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, "KeyboardInterrupt" in output) == (2, True), output
    assert not [name for name in "ab" if (tmp_path / name).exists()]


STARTS = """
import os
from pathlib import Path
from support import warm
class Interpreter:
    def __init__(self):
        self.owner = os.getpid()
        assert not Path(f"ended-{self.owner}").exists()
        Path(f"started-{self.owner}").touch(exist_ok=False)
    def close(self): Path(f"started-{self.owner}").rename(f"ended-{self.owner}")
def test_starts(monkeypatch):
    monkeypatch.setattr(warm, "Server", Interpreter)
    warm._warm()
"""


def test_an_interpreter_that_is_ready_serves_all_files_of_a_worker_and_ends_with_it(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"test_{name}.py").write_text(STARTS)
    code, output = run(tmp_path, "--workers", "2", "-p", "conftest", files=[])
    assert code == 0, output
    assert 1 <= len(list(tmp_path.glob("ended-*"))) <= 2
    assert not list(tmp_path.glob("started-*"))
