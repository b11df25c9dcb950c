"""What holds for every command: one JSON document in one shape, also for an error; help in 80 columns; names completed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.shell_completion import ShellComplete
from rich.console import Console
from support.daemons import two_checkpoints

from flashckpt.cli import main as cli
from flashckpt.commands import progress as shown

Captured = pytest.CaptureFixture[str]
PARTS = {"type", "problem", "found", "expected", "state", "remedy", "exit_code"}
# what each is called with: {root} with checkpoints 10 and 20, {new} without any, {bad} a file where a folder should be
WORDS: dict[str, tuple[str, str]] = {
    "ls": ("{root}", "{bad}"),
    "inspect": ("{root}", "{bad}"),
    "verify": ("{root}", "{bad}"),
    "diff": ("{root} 10 10", "{bad} 10 10"),
    "export": ("{root} --to {new}.safetensors", "{bad} --to {new}.safetensors"),
    "import": ("{weights} {new} --step 1", "{bad} {new}"),
    "keep": ("{root} 20", "{bad} 10"),
    "cp": ("{root} {new}", "{bad} {new}"),
    "rm": ("{root} 10", "{bad} 10"),
    "gc": ("{root}", "{bad}"),
    "forget": ("{new}", "--job fake --keep-memory {bad}"),
    "status": ("{root}", "{bad}"),
    "top": ("{root}", "{bad}"),
    "watch": ("{root} --committed 20", "{bad}"),
    "persist": ("{root}", "{bad}"),
    "dashboard": ("{root}", "{bad}"),
    "check": ("", "--json --kill-after 9 --steps 5 {bad}"),
    "doctor": ("{root}", "--state much"),
    "examples": ("", "none.py"),
    "bench": ("", "store {bad}/x"),
    "plan": ("--state 1GB", "--state much"),
    "train": ("", "nothing"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    import numpy as np
    from safetensors.numpy import save_file

    folder = tmp_path_factory.mktemp("commands")
    (folder / "bad").write_text("not a folder")
    save_file({"w": np.ones(3, np.float32)}, folder / "weights.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        (memory := folder / "memory").mkdir()
        patch.setenv("FLASHCKPT_SHM_DIR", str(memory))
        with two_checkpoints(folder / "root", {"w": (40, 3)}) as root:
            yield {
                "root": Path(root),
                "bad": folder / "bad",
                "weights": folder / "weights.safetensors",
                "memory": memory,
            }


@pytest.fixture
def places(made: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setenv("FLASHCKPT_SHM_DIR", str(made["memory"]))
    return {name: str(path) for name, path in made.items()} | {"new": str(tmp_path / "new")}


def printed(name: str, words: str, places: dict[str, str], capsys: Captured) -> tuple[int, Any]:
    with pytest.raises(SystemExit) as done:
        cli.main([name, *words.format(**places).split(), *(() if "--json" in words else ("--json",))])
    return int(done.value.code or 0), json.loads(capsys.readouterr().out)


def test_there_are_words_for_every_command() -> None:
    assert WORDS.keys() == cli.COMMANDS.keys()


@pytest.mark.parametrize(
    "name", [name for name, words in WORDS.items() if words[0] and name not in ("persist", "plan")]
)
def test_a_command_prints_one_object(name: str, places: dict[str, str], capsys: Captured) -> None:
    if name == "watch":  # its root has no session, so that only what it waits for ends it
        assert printed(name, WORDS[name][0], places, capsys)[1]["reached"]
        return
    code, found = printed(name, WORDS[name][0], places, capsys)
    assert code == 0, found
    assert isinstance(found, dict)
    assert not found.get("error")


@pytest.mark.parametrize("name", WORDS)
def test_an_error_has_the_same_parts_everywhere(name: str, places: dict[str, str], capsys: Captured) -> None:
    code, found = printed(name, WORDS[name][1], places, capsys)
    assert found.keys() == {"error"}
    assert found["error"].keys() == PARTS
    assert found["error"]["exit_code"] == code > 1
    assert found["error"]["problem"]


@pytest.mark.parametrize("name", WORDS)
def test_help_fits_80_columns_and_names_json(name: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as done:
        cli.main([name, "--help"])
    assert not done.value.code
    text = capsys.readouterr().out
    told = text[: text.index("STATE")] if name == "ls" else text  # a table, and examples, are as they are written
    assert not [line for line in told.splitlines() if len(line) > 80 and "flashckpt " not in line]
    assert "--json" in text or name == "bench"  # its own commands have it


def completed(*words: str) -> list[str]:
    complete = ShellComplete(cli.group, {}, "flashckpt", "_FLASHCKPT_COMPLETE")
    return [item.value for item in complete.get_completions(list(words[:-1]), words[-1])]


def test_steps_and_jobs_are_completed(places: dict[str, str]) -> None:
    root = places["root"]
    for words in (
        ["inspect", root, "--step"],
        ["keep", root],
        ["rm", root],
        ["cp", root, "x", "--step"],
        ["diff", root],
    ):
        assert completed(*words, "") == ["20", "10"]
    assert completed("diff", root, "10", "2") == ["20"]
    for words in (["status", "--job"], ["gc", "--job"], ["forget", "--job"], ["top"], ["watch"], ["persist"]):
        assert completed(*words, "fa") == ["fake"]
    assert completed("inspect", places["bad"], "--step", "") == []
    for words in (["cp"], ["cp", root], ["dashboard"]):
        assert completed(*words, "/no") == ["/no"]  # a path, for the shell
    assert completed("per") == ["persist"]
    assert completed("train", "d") == ["data", "dry-run"]


def test_the_parts_of_the_trainer_are_commands(tmp_path: Path, capsys: Captured) -> None:
    """Each gets the words behind it, `--help` included, and its exit code is that of the command."""
    parts = {"run": "Train a Llama-like", "hub": "trainer hub [OPTIONS]", "generate": "Usage: ", "plan": "Usage: "}
    for words, code, text in (
        *(([name, "--help"], 0, text) for name, text in parts.items()),
        (["config", "--train.steps", "7"], 0, "steps = 7"),
        (["run", "--train.steps", "-7"], 10, ""),
    ):
        with pytest.raises(SystemExit) as done:
            cli.main(["train", *words])
        assert (done.value.code or 0) == code, words
        assert text in capsys.readouterr().out, words


def test_a_step_that_two_generations_have_is_completed_with_its_generation(
    places: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashckpt.checkpoint.catalog import CheckpointInfo
    from flashckpt.cli import common

    infos = [CheckpointInfo(prefix="", generation=g, step=s) for g, s in ((2, 20), (2, 10), (1, 10))]
    monkeypatch.setattr(common, "list_checkpoints", lambda store: infos)
    assert completed("keep", places["root"], "") == ["20", "10.g2", "10.g1"]


def test_a_bar_comes_after_two_seconds_and_never_into_a_file(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    with shown.progress("copying", 100) as advance:
        advance(50)
    assert capsys.readouterr().err == ""
    console = Console(force_terminal=True, width=80, stderr=True)
    monkeypatch.setattr(shown, "OutputConsole", lambda **_: console)
    with shown.progress("copying", 100) as advance:
        advance(50)
    assert "copying" not in capsys.readouterr().err
    monkeypatch.setattr(shown, "AFTER_S", 0.0)
    with shown.progress("copying", 100) as advance:
        advance(50)
    text = capsys.readouterr().err
    assert "copying" in text
    assert "50/100 bytes" in text


def test_every_command_is_a_click_command() -> None:
    with cli.group.make_context("flashckpt", [], resilient_parsing=True) as context:
        for name in cli.COMMANDS:
            assert isinstance(cli.group.get_command(context, name), click.Command)
