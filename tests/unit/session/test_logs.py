"""Notices of the library: through `logging`, on standard error where the program has none; nothing is set up for it."""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from support import warm
from support.one_rank import agent_of_the_test  # noqa: F401 -- a fixture

import flashckpt
from flashckpt.report import notice

PROGRAM = """
import logging, sys, torch
from flashckpt import Checkpointer
{setup}
def run():
    model = torch.nn.Linear(2, 2)
    ckpt = Checkpointer(sys.argv[1], snapshot_every=1, job=sys.argv[1].rpartition("/")[2])
    ckpt.track(model=model)
    report = ckpt.restore()
    return ckpt, report
ckpt, _ = run()
ckpt.step(1)
ckpt.fence()
ckpt._session.close()
ckpt, report = run()
assert report.step == 1, report
ckpt._session.close()
logger = logging.getLogger("flashckpt")
print("handlers", len(logger.handlers), len(logging.root.handlers), "level", logger.level, logging.root.level)
"""


def run(root: Path, setup: str = "", **more: Any) -> tuple[str, str]:
    folder = root.with_name(f"{root.name}-program")
    folder.mkdir(exist_ok=True)
    (folder / "program.py").write_text(PROGRAM.format(setup=setup))
    done = warm.run([str(folder / "program.py"), str(root)], folder, **more)
    done.check_returncode()
    return done.stdout, done.stderr


def test_notices_are_on_standard_error_and_nothing_is_set_up(tmp_path: Path) -> None:
    out, err = run(tmp_path)
    assert out == "handlers 0 0 level 0 30\n"
    assert "[flashckpt] snapshots: " in err
    assert "[flashckpt] restored step 1 " in err


@pytest.mark.matrix
def test_a_program_with_logging_of_its_own_gets_records(tmp_path: Path) -> None:
    out, err = run(tmp_path, "logging.basicConfig(level=logging.INFO, format='mine %(name)s %(message)s')")
    assert out == "handlers 0 1 level 0 20\n"
    assert "mine flashckpt restored step 1 " in err
    assert "[flashckpt]" not in err
    assert "restored" not in run(tmp_path / "b", "logging.basicConfig()")[1], "its level is WARNING"


@pytest.mark.matrix
def test_a_level_without_handlers_is_obeyed_and_a_broken_standard_error_is_no_error(tmp_path: Path) -> None:
    assert "restored" not in run(tmp_path / "a", "logging.getLogger('flashckpt').setLevel(logging.ERROR)")[1]
    assert "restored" not in run(tmp_path / "b", "logging.disable(logging.INFO)")[1]
    assert "handlers 0 0" in run(tmp_path / "c", "sys.stderr.close()")[0]


def test_no_logger_of_the_engine_lets_a_handler_end_a_step_or_a_restore() -> None:
    """A user's handler may raise on a full disk; what runs in training threads logs through `guarded`."""
    engine = Path(flashckpt.__file__).parent
    found = 0
    for path in [
        *engine.glob("*.py"),
        *(p for part in ("tracking", "restore", "staging") for p in (engine / part).glob("*.py")),
    ]:
        for line in path.read_text().splitlines():
            if line.startswith("_log = "):
                found += 1
                assert line.startswith("_log = guarded("), path.name
    assert found > 5


def test_a_notice_is_escaped_shown_where_it_should_be_and_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.Logger("alone")  # noqa: LOG001 -- it has neither parent nor handlers
    monkeypatch.setattr(sys, "stderr", err := io.StringIO())
    notice(logger, "a %s", "tensor\x1b[2J")
    notice(logger, "not here", is_shown=False)
    notice(logger, "wrong %d fields", "x")
    assert err.getvalue() == "[flashckpt] a tensor\\x1b[2J\n"

    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError(28, "No space left on device")

    logger.addHandler(Broken())
    notice(logger, "lost")
