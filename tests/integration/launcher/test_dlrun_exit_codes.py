"""docs/launching.md says what each exit code of dlrun means: here the whole table is asked of the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.agents import pretend_agent
from support.paths import ROOT

from flashckpt import errors
from flashckpt.daemon.launcher import cli
from flashckpt.daemon.launcher.budget import RESTARTS
from flashckpt.daemon.launcher.options import LaunchOutcome, NodeCheckError
from flashckpt.daemon.zygote import worker
from flashckpt.errors import FINAL_CODES, RESUME_EXIT_CODE, FlashckptError, HangError, PersistError, RestartBudgetError

pytestmark = pytest.mark.timeout(300)
TEXT = (ROOT / "docs" / "launching.md").read_text()


def family(cls: type[FlashckptError]) -> list[type[FlashckptError]]:
    found = [cls, *(later for child in cls.__subclasses__() for later in family(child))]
    return [one for one in found if one.__module__ == "flashckpt.errors"]


def table() -> dict[str, str]:
    """Code or range of the page's table -> what a scheduler should do."""
    section = TEXT.split("## Exit codes")[1].split("## ")[0]
    rows = re.findall(r"^\| ([\d+n, -]+) \| (.+) \| (.+) \|$", section, re.MULTILINE)
    return {code: f"{meaning} | {action}" for code, meaning, action in rows}


@pytest.mark.parametrize("cls", family(FlashckptError), ids=lambda cls: cls.__name__)
def test_every_error_is_final_or_retried_as_the_table_says(
    cls: type[FlashckptError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank that ends with it leaves word for the agent exactly if the table says that it would fail again."""
    monkeypatch.setenv("FLASHCKPT_AGENT_DIR", pretend_agent(tmp_path))

    def explode(*_: Any, **__: Any) -> None:
        raise cls("on purpose")

    monkeypatch.setattr(worker, "_run_script", explode)
    request = {"argv": ["x.py"], "module": False, "stderr": "", "error_file": str(tmp_path / "error.json")}
    assert worker.run_recorded(request) == cls.exit_code
    refused = tmp_path / "refused"
    assert "nothing: it would fail again" in table()[f"{FINAL_CODES[0]}-{FINAL_CODES[-1]}"]
    assert refused.exists() == (10 <= cls.exit_code <= 19)
    if refused.exists():
        assert refused.read_text() == str(cls.exit_code)
    capsys.readouterr()


def test_rows_of_the_table_are_the_codes_of_dlrun() -> None:
    ends = {
        "0": 0,
        "1": 1,
        "2": 2,
        "10-19": LaunchOutcome(refused=17).error(),
        str(RestartBudgetError.exit_code): LaunchOutcome(repeats="x").error(),
        "40, 41": LaunchOutcome(passing=41).error(),
        str(HangError.exit_code): LaunchOutcome(hang="x").error(),
        str(NodeCheckError.exit_code): NodeCheckError("x"),
        str(PersistError.exit_code): PersistError("x"),
        str(RESUME_EXIT_CODE): RESUME_EXIT_CODE,
        "128+n": 128,
    }
    assert set(table()) == set(ends)
    for row, end in ends.items():
        code = end.exit_code if isinstance(end, FlashckptError) else end
        assert code is not None
        assert str(code) in row.split(", ") or row == "128+n" or 10 <= int(str(code)) <= 19
    assert {cls.exit_code for cls in family(FlashckptError) if cls.exit_code in FINAL_CODES} == set(FINAL_CODES)
    assert errors.FlashckptError.exit_code == 1


def test_default_of_max_restarts_is_in_the_help_and_the_page_and_numbers_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PET_MAX_RESTARTS", raising=False)
    assert f"Default: {RESTARTS}" in " ".join(cli.get_args_parser().format_help().split())
    assert f"{RESTARTS} without progress" in TEXT
    for flags, wanted in (([], RESTARTS), (["--max-restarts=0"], 0), (["--max_restarts", "7"], 7)):
        config, _, _ = cli.config_from_args(cli.parse_args([*flags, "x.py"]))
        assert config.max_restarts == wanted
    monkeypatch.setenv("PET_MAX_RESTARTS", "0")
    assert cli.parse_args(["x.py"]).max_restarts == 0
