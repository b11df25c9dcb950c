"""`flashckpt examples`: what travels with the package is listed, written byte for byte, and overwrites nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT

from flashckpt.cli import main as cli
from flashckpt.console import examples

Captured = pytest.CaptureFixture[str]
SHIPPED = {
    path.relative_to(ROOT).as_posix(): path.read_bytes()
    for path in [*(ROOT / "examples").glob("*.py"), *(ROOT / "configs").glob("*.toml")]
}


@pytest.fixture(autouse=True)
def _below_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*arguments: str, capsys: Captured) -> tuple[int, Any]:
    """Run `flashckpt examples` in this process; return its exit code and its JSON document."""
    with pytest.raises(SystemExit) as done:
        cli.main(["examples", *arguments, "--json"])
    return int(done.value.code or 0), json.loads(capsys.readouterr().out)


def below(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_all_are_listed_with_what_they_are_about(tmp_path: Path, capsys: Captured) -> None:
    code, document = run(capsys=capsys)
    assert code == 0
    assert {row["name"] for row in document["examples"]} == set(SHIPPED)
    for row in document["examples"]:
        assert len(row["about"]) > 20, row
        if row["name"].startswith("examples/"):
            assert row["name"] in SHIPPED[row["name"]].decode(), "its first lines say how it is run"
    assert below(tmp_path) == {}, "a list writes nothing"


@pytest.mark.parametrize(
    ("text", "suffix", "expected"),
    [
        ('"""Does this. And that."""\n', ".py", "Does this"),
        ('"""Does 1.5 of\nthis.\n\npython it.py\n"""\n', ".py", "Does 1.5 of this"),
        ("x = 1\n", ".py", ""),
        ("# Does this:\n#   dlrun it\n[model]\n# no more\n", ".toml", "Does this"),
        ("# Does\n# this. And that.\n[model]\n", ".toml", "Does this"),
        ("[model]\n# dim\n", ".toml", ""),
    ],
)
def test_about_is_the_first_sentence(text: str, suffix: str, expected: str) -> None:
    assert examples.about(text, suffix) == expected


def test_those_named_are_written_byte_for_byte_where_their_commands_expect_them(
    tmp_path: Path, capsys: Captured
) -> None:
    written = ["examples/first_loop.py", "configs/tiny.toml"]
    assert run("first_loop.py", "configs/tiny.toml", capsys=capsys) == (0, {"written": written, "unchanged": []})
    assert below(tmp_path) == {name: SHIPPED[name] for name in written}
    assert run("first_loop.py", "first_loop.py", capsys=capsys)[1] == {"written": [], "unchanged": written[:1]}
    code, document = run("--to", "all/here", capsys=capsys)
    assert (code, len(document["written"])) == (0, len(SHIPPED))
    assert below(tmp_path / "all/here") == SHIPPED


def test_what_differs_is_left_and_nothing_is_written(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/tiny.toml").write_text("mine")
    code, document = run("first_loop.py", "tiny.toml", capsys=capsys)
    assert (code, document["error"]["state"]) == (10, "It was left unchanged. Nothing was written.")
    assert below(tmp_path) == {"configs/tiny.toml": b"mine"}


@pytest.mark.parametrize("kind", ["folder", "dangling link", "pipe"])
def test_what_is_no_file_is_left(kind: str, tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "examples/first_loop.py"
    path.parent.mkdir()
    make: dict[str, Callable[[], object]] = {
        "folder": path.mkdir,
        "dangling link": lambda: path.symlink_to("none"),
        "pipe": lambda: os.mkfifo(path),
    }
    make[kind]()
    assert run("first_loop.py", capsys=capsys)[0] == 10
    assert below(tmp_path) == {}
    assert os.path.lexists(path)


def test_a_file_that_appears_while_another_is_written_is_left(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def somebody_else(_: str) -> None:
        (tmp_path / "configs").mkdir(exist_ok=True)
        (tmp_path / "configs/tiny.toml").write_text("theirs")

    monkeypatch.setattr(examples, "crash_point", somebody_else)
    code, document = run("first_loop.py", "tiny.toml", capsys=capsys)
    assert code == 10
    assert document["error"]["state"] == "It was left unchanged. Written: examples/first_loop.py."
    first = SHIPPED["examples/first_loop.py"]
    assert below(tmp_path) == {"configs/tiny.toml": b"theirs", "examples/first_loop.py": first}


def test_a_file_that_takes_the_name_before_the_link_is_left(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "configs/tiny.toml"
    monkeypatch.setattr(examples, "crash_point", lambda _: target.write_text("theirs"))
    assert run("tiny.toml", capsys=capsys)[0] == 10
    assert below(tmp_path) == {"configs/tiny.toml": b"theirs"}


def test_killed_before_it_has_the_name_the_next_call_writes_it(tmp_path: Path, capsys: Captured) -> None:
    program = (
        "import sys; from flashckpt import faults; from flashckpt.cli import main as cli; "
        "faults.arm(sys.argv[1]); cli.main(['examples', 'first_loop.py'])"
    )
    command = [sys.executable, "-c", program, "examples.before-link"]
    assert subprocess.run(command, cwd=tmp_path, check=False).returncode == -signal.SIGKILL
    assert not (tmp_path / "examples/first_loop.py").exists()
    assert run("first_loop.py", capsys=capsys)[1]["written"] == ["examples/first_loop.py"]
    assert (tmp_path / "examples/first_loop.py").read_bytes() == SHIPPED["examples/first_loop.py"]


def test_an_unknown_name_is_an_error_that_names_the_nearest(tmp_path: Path, capsys: Captured) -> None:
    code, document = run("first_loop.py", "tinny.toml", capsys=capsys)
    assert (code, document["error"]["expected"]) == (10, "tiny.toml, perhaps")
    code, document = run("../README.md", capsys=capsys)
    assert code == 10
    assert "first_loop.py, " in document["error"]["expected"]
    assert below(tmp_path) == {}


def test_an_installation_without_them_is_an_error(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examples, "FOLDERS", {"none": "*.py"})
    code, document = run(capsys=capsys)
    assert (code, document["error"]["problem"]) == (10, "this installation has no examples")


def test_a_folder_that_a_terminal_would_not_show_is_escaped(capsys: Captured) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main(["examples", "tiny.toml", "--to", "a\x1b[bold]b"])
    assert done.value.code == 0
    assert capsys.readouterr().out == "a\\x1b[bold]b/configs/tiny.toml is written\n"


def test_no_two_have_one_name() -> None:
    """NAME may be given without its folder."""
    assert len({Path(name).name for name in SHIPPED}) == len(SHIPPED) >= 10
