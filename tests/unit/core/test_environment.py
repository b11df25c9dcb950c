"""A wrong environment variable is refused by each program that it matters to, where that starts, and by its name."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.dlrun import run_dlrun

from flashckpt.cli import main as command
from flashckpt.daemon.launcher import cli
from flashckpt.daemon.persister import service
from flashckpt.daemon.persister.timeouts import DaemonTimeouts
from flashckpt.environment import STARTS, TABLE, Variable, env
from flashckpt.errors import ConfigError
from flashckpt.native.copying import IMPLEMENTATIONS
from flashckpt.session.checkpointer import Checkpointer
from flashckpt.trainer import __main__ as trainer

NUMBERS = ("abc", "1,5", "nan", "inf", "-1e9", "0x10", "1e99s")
WRONG: dict[str, tuple[str, ...]] = {
    "FLASHCKPT_JOB_ID": ("../up", "a b", "x" * 129, "-x"),
    "FLASHCKPT_JOB_SECRET": ("fifteen letters",),
    "FLASHCKPT_COPY": ("warp", "Python"),
    "FLASHCKPT_LOGLEVEL": ("verbose", "10", "debug"),
    "FLASHCKPT_METRICS_PORT": ("-1", "65536"),
    "FLASHCKPT_REPLICA_NICE": ("-21", "20"),
    "FLASHCKPT_REPLICA_PATIENCE": ("0", "-1"),
    "FLASHCKPT_KEEP_DEAD": ("-1", "30s"),
    "FLASHCKPT_RESTART": ("-1",),
    "FLASHCKPT_LEAVE_OUT": ("43", "41-", "41 to 43"),
    "FLASHCKPT_HOOK": ("drain 'node",),
    "FLASHCKPT_AFTER_COMMIT": ("export --to /w/{step}", "cp --every soon /x", "mv --kept /x", "cp --kept '/x"),
    "FLASHCKPT_OTLP_URL": ("collector:4318", "grpc://collector:4317"),
    "WORLD_SIZE": ("0",),
}
"""Beside those of the type."""


def wrong(row: Variable[Any]) -> tuple[str, ...]:
    """Return wrong values of a variable; none where any text is right."""
    if row._read is str:
        return ()
    of_type = (
        ()
        if isinstance(row.default, (str, list))
        else (*NUMBERS, *(() if isinstance(row.default, float) else ("1.5", "2.")))
    )
    found = of_type + WRONG.get(row.name, ())
    assert found, f"{row.name} is checked, and no wrong value of it is known here"
    return found


def start_rank(folder: Path, _: pytest.MonkeyPatch) -> None:
    Checkpointer(folder / "root")


def start_dlrun(folder: Path, _: pytest.MonkeyPatch) -> None:
    cli.main([str(folder / "no-such-script.py")])


def start_persister(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    for part, name in ((service, "configure"), (faulthandler, "enable"), (os, "setsid")):
        monkeypatch.setattr(part, name, lambda *_, **__: None)  # what a process of its own would change
    return service.main([str(folder)])


def start_command(*_: object) -> None:
    command.main(["status", "--json"])


def start_trainer(*_: object) -> int:
    return trainer.main(["--print-config"])


PROGRAMS: dict[str, Callable[[Path, pytest.MonkeyPatch], int | None]] = {
    "rank": start_rank,
    "dlrun": start_dlrun,
    "persister": start_persister,
    "command": start_command,
    "trainer": start_trainer,
}


def cases() -> Iterator[Any]:
    for program in PROGRAMS:
        for row in TABLE.values():
            if program in row.by or (not row.is_given and row.by & STARTS[program]):
                yield from (
                    pytest.param(program, row.name, text, id=f"{program}-{row.name}-{text[:9]}") for text in wrong(row)
                )


@pytest.mark.parametrize(("program", "name", "text"), list(cases()))
def test_program_refuses_a_wrong_value_where_it_starts(
    program: str, name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setenv(name, text)
    said = ""
    try:
        code = PROGRAMS[program](tmp_path, monkeypatch)
    except ConfigError as error:
        assert program in ("rank", "dlrun"), "a program ends with an exit code"
        code, said = error.exit_code, str(error)
    except SystemExit as error:
        code = error.code  # type: ignore[assignment]
    said += "".join((*capfd.readouterr(), *caplog.messages))
    assert code == 10, said
    assert f"invalid {name}" in said
    assert TABLE[name].expected.replace('"', '\\"') in said
    shown = f"{len(text)} characters" if TABLE[name].is_secret else text[:90]
    assert shown in said
    assert not TABLE[name].is_secret or text not in said
    assert not list(tmp_path.iterdir()), "nothing was started"


def test_programs_start_where_every_variable_is_empty_and_take_the_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {name: os.environ[name] for name in ("FLASHCKPT_SHM_DIR", "OMP_NUM_THREADS")}
    for name in TABLE.keys() - kept.keys():
        monkeypatch.setenv(name, "")
    for program in STARTS:
        env.check(program)
    for name, row in TABLE.items():
        assert getattr(env, name) == kept.get(name, row.default)
    Checkpointer(tmp_path / "root")
    assert DaemonTimeouts() == DaemonTimeouts(linger_s=30.0, patience_s=600.0, grace_s=60.0)


def test_right_values_are_read_as_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    right = {
        "FLASHCKPT_DAEMON_LINGER": ("1e1", 10.0),
        "FLASHCKPT_KEEP_DEAD": ("0", 0.0),
        "FLASHCKPT_METRICS_PORT": ("0", 0),
        "FLASHCKPT_REPLICA_NICE": ("-20", -20),
        "FLASHCKPT_WAIT_FLUSH": ("1", True),
        "FLASHCKPT_TRACEBACK": ("off", False),
        "FLASHCKPT_COPY": ("avx2-near", "avx2-near"),
        "FLASHCKPT_LOGLEVEL": ("WARNING", "WARNING"),
        "FLASHCKPT_JOB_ID": ("x" * 128, "x" * 128),
        "FLASHCKPT_JOB_SECRET": ("sixteen letters!", "sixteen letters!"),
    }
    for name, (text, value) in right.items():
        monkeypatch.setenv(name, text)
        assert getattr(env, name) == value
    assert DaemonTimeouts().linger_s == 10.0


def test_what_a_launcher_sets_for_its_workers_is_not_the_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "left by another job")
    env.check("dlrun")
    with pytest.raises(ConfigError):
        env.check("rank")


def test_process_that_is_forked_reads_its_own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHCKPT_RESTART", "1")
    assert env.FLASHCKPT_RESTART == 1
    pid = os.fork()
    if not pid:  # as daemon/launcher/worker.py does in a fork of the zygote
        os.environ.clear()
        os.environ.update({"FLASHCKPT_RESTART": "7"})
        os._exit(env.FLASHCKPT_RESTART)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert env.FLASHCKPT_RESTART == 1


def test_known_copies_are_those_that_a_control_row_can_name() -> None:
    named = tuple(name.removeprefix("native ") for name in IMPLEMENTATIONS if name)
    assert TABLE["FLASHCKPT_COPY"].expected.replace(" or ", ", ").split(", ") == list(named)


def test_dlrun_ends_with_one_error_for_a_variable_of_the_persister(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text("print('the script runs')\n")
    code, output = run_dlrun(tmp_path, "--nproc-per-node=1", script, env={"FLASHCKPT_DAEMON_LINGER": "30s"})
    assert code == 10, output
    assert output.count("invalid FLASHCKPT_DAEMON_LINGER") == 1
    assert "the script runs" not in output
