"""What the commands print: names of others, terminals of any width, JSON, pipes and disks that are closed or full."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from rich.console import Console
from support.daemons import two_checkpoints

from flashckpt.checkpoint.catalog import read_manifest
from flashckpt.cli import common
from flashckpt.cli import main as cli
from flashckpt.cli.output import FittingTable
from flashckpt.commands import gc, status, status_page
from flashckpt.console import diff, inspect
from flashckpt.errors import DamagedError, StoreError
from flashckpt.printable import counted, plain, printable, to_json
from flashckpt.report import PrintableFormatter
from flashckpt.storage.factory import open_store

NASTY = "a[/]\x1b]0;title\x07[bold]\u202eb"
SHOWN = r"a[/]\x1b]0;title\x07[bold]\u202eb"
COMMANDS = [["ls", "ROOT"], ["inspect", "ROOT", "--all"], ["verify", "ROOT"], ["diff", "ROOT", "10", "20"], ["status"],
            ["gc", "ROOT"], ["plan", "--gpus", "64", "--layout", "llama3-8b"], ["--help"]]  # fmt: skip


@pytest.fixture
def root(tmp_path: Path) -> Iterator[str]:
    """A root with steps 10 and 20 and a tensor whose name terminals and rich could trip over."""
    name = "optimizer.0.model.layers.0.feed_forward.w1.weight.exp_avg"
    with two_checkpoints(tmp_path / "root", {name: (50, 4), f"model.{NASTY}.b": (7,)}) as made:
        yield made


def run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as done:
        cli.main(list(arguments))
    out, err = capsys.readouterr()
    return int(done.value.code or 0), out, err


def program(arguments: list[str], **streams: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flashckpt.cli.main", *arguments]
    return subprocess.run(command, check=False, text=True, **streams)


# -- names of others ------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["inspect ROOT --all", "diff ROOT 10 20", "inspect ROOT --all --json", "ls ROOT"])
def test_names_are_printed_as_they_are_and_escaped(command: str, root: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(*command.replace("ROOT", root).split(), capsys=capsys)
    assert code in (0, 1), err
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", out)
    if "ls" not in command and "--json" not in command:
        assert SHOWN in out


def test_errors_and_logs_escape_names() -> None:
    error = DamagedError(f"tensor {NASTY} is damaged", found="first\nsecond")
    assert f"tensor {SHOWN} is damaged\n  found:    first\nsecond\n" in str(error)
    assert error.problem == f"tensor {NASTY} is damaged"
    record = logging.LogRecord("x", logging.INFO, "", 0, "tensor %s", (NASTY,), None)
    assert PrintableFormatter("[flashckpt] %(message)s").format(record) == f"[flashckpt] tensor {SHOWN}"


@pytest.mark.parametrize(
    ("text", "shown"),
    [("plain é 漢", "plain é 漢"), ("a\nb\tc", r"a\nb\tc"), ("\udce9", r"\udce9"), ("\x9b31m", r"\x9b31m"), ("[/]", "[/]"),
     (10**5000, "<integer of 16610 bits>"), ([10**5000], "['<integer of 16610 bits>']")],
    ids=range(7),
)  # fmt: skip
def test_printable(text: object, shown: str) -> None:
    assert printable(text) == shown


# -- JSON ---------------------------------------------------------------------------------------------------


def test_json_holds_what_json_can_hold() -> None:
    value = {
        "a": float("nan"),
        "b": [float("-inf"), 1.5, True, None],
        3: b"xyz",
        "n": 1 << 20_000,
        "i": np.int64(7),
        "s": {1},
    }
    text = to_json(value)
    json.loads(text, parse_constant=pytest.fail)
    assert plain(value) == {
        "a": "nan", "b": ["-inf", 1.5, True, None], "3": "<3 bytes>", "n": "<integer of 20001 bits>", "i": "7", "s": [1],
    }  # fmt: skip


HUGE = {"big": 1 << 20_000, "nan": float("nan"), "same": float("nan"), f"rng@{NASTY}": [b"1", 1 << 20_000]}


@pytest.mark.parametrize(
    "command", ["inspect ROOT", "inspect ROOT --json", "diff ROOT 10 20", "diff ROOT 10 20 --json"]
)
def test_values_that_json_and_python_text_lack_are_shown(
    command: str, root: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_values(*given: Any, **options: Any) -> Any:
        manifest = read_manifest(*given, **options)
        manifest.values.update(HUGE, step=manifest.step, big=(1 << 20_000) + manifest.step)
        return manifest

    for module in ("inspect", "diff"):
        monkeypatch.setattr(f"flashckpt.console.{module}.read_manifest", with_values)
    code, out, err = run(*command.replace("ROOT", root).split(), capsys=capsys)
    assert code in (0, 1), err
    assert "<integer of 20001 bits>" in out
    if "--json" in command:
        found = set(json.loads(out, parse_constant=pytest.fail)["values"]) - {"rng@rank0", "rng@rank1"}
        assert found == ({"big", "step"} if "diff" in command else {*HUGE, "step"})


def test_equality_of_values_tells_kinds_apart_and_nan_is_itself() -> None:
    equal = [(float("nan"), float("nan")), ({"a": [1, (2,)]}, {"a": [1, (2,)]}), (1 << 20_000, 1 << 20_000)]
    differ = [(1, 1.0), (0.0, -0.0), ([1], (1,)), ({"a": 1}, {"b": 1}), (1 << 20_000, 1 << 20_001), (True, 1)]
    assert all(diff.same(x, y) for x, y in equal)
    assert not any(diff.same(x, y) for x, y in differ)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(24, "Too many open files"), ValueError("x"), RecursionError("y"),
                                   MemoryError(), StoreError("cannot read x\x1b[m")])  # fmt: skip
def test_every_command_says_every_error_in_one_form(
    error: BaseException, root: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in cli.COMMANDS:  # before anything is patched, or they would import what is patched
        cli.group.get_command(click.Context(cli.group), name)

    def fail(*_: object, **__: object) -> None:
        raise error

    for place in (
        "interop.import_command.open_foreign",
        "commands.status.jobs_in_memory",
        "storage.posix.PosixStore.check",
    ):
        monkeypatch.setattr(f"flashckpt.{place}", fail)
    wanted: dict[type[BaseException], set[int]] = {KeyboardInterrupt: {130}, OSError: {74, 10}, StoreError: {41}}
    for line in ("ls R", "inspect R", "verify R", "keep R 10", "diff R 10 20", "gc R", "export R --to x.pt",
                 "import R R --step 1 --format torch", "status"):  # fmt: skip
        arguments = [root if word == "R" else word for word in line.split()]
        code, out, err = run(*arguments, capsys=capsys)
        assert (out, "Traceback" in err, bool(err)) == ("", False, True), line
        code_of_json, out, _ = run(*arguments, "--json", capsys=capsys)
        found = json.loads(out)["error"]
        assert code_of_json == code == found["exit_code"], line
        assert set(found) == {"type", "problem", "found", "expected", "state", "remedy", "exit_code"}
        assert code in wanted.get(type(error), {70}), line


def test_bench_and_plan_print_their_json_where_no_path_is_given(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["plan", "--gpus", "64", "--layout", "llama3-8b"]
    code, out, _ = run(*arguments, "--json", capsys=capsys)
    assert (code, json.loads(out, parse_constant=pytest.fail)["gpus"]) == (0, 64)
    code, _, _ = run(*arguments, "--json", str(tmp_path / "plan.json"), capsys=capsys)
    assert (code, json.loads((tmp_path / "plan.json").read_text())["gpus"]) == (0, 64)
    code, out, _ = run(*arguments, f"--json={tmp_path}/{'x' * 300}", capsys=capsys)
    assert (code, json.loads(out)["error"]["type"]) == (10, "ConfigError")


# -- terminals ------------------------------------------------------------------------------------------------


def shown(part: object, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=True, color_system=None, markup=False, highlight=False).print(part)
    return out.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 200])
def test_no_number_or_name_of_a_table_is_cut_in_a_narrow_terminal(width: int, root: str) -> None:
    store = open_store(root)
    a, b = (diff._source(store, step) for step in ("10", "20"))
    document = diff.compare(a, b)
    document["values"]["sampler@rank0"] = [
        {"seed": 1, "epoch": 2, "offset": 3_000_000_001},
        {"seed": 1, "epoch": 2, "offset": 4},
    ]
    text = shown(diff._table(document, None), width)
    for tensor in document["tensors"]:
        assert str(tensor["elements"]) in text.split()
        assert f"{tensor['max_abs']:.3g}" in text.split()
        assert printable(tensor["fqn"])[:20] in text
        assert printable(tensor["fqn"]) in text or width < 100, "folded, not cut"
    assert "DIFFERING" in text
    assert "3000000001" in text
    assert "sampler@rank0.offset" in re.sub(r"\s+", "", text)
    assert "epoch" not in text, "only what differs is shown"
    assert "…" not in text
    jobs = [status.describe(directory) for directory in common.jobs_on_this_machine()]
    text = shown(status_page.table(jobs, "native avx512"), width)
    for word in ("20.g1", "fake", "SNAPSHOT", "avx512"):
        assert word in text
    assert "…" not in text


def test_tables_of_pipes_are_never_broken(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    table = FittingTable("NAME", ">SIZE", "")
    table.add_row("n" * 300, 1234567890, "remark " * 30)
    common.show({}, as_json=False, table=lambda: table)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert "n" * 300 in lines[1]
    assert "1234567890" in lines[1]


def test_numbers_of_one_are_singular(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert [counted(n, "shard") for n in (0, 1, 2)] == ["0 shards", "1 shard", "2 shards"]
    _, out, _ = run("inspect", root, "--all", capsys=capsys)
    assert "in 2 shards" in out
    assert not re.search(r"\b1 (shards|tensors|ranks|writers)", out)


def test_inspect_shows_the_values_of_one_rank_and_counts_the_others() -> None:
    values = {"step": 3, **{f"rng@rank{rank}": {"cpu": rank} for rank in range(1000)}, "lr": 0.5}
    document = {"prefix": "p", "job": "j", "created_s": 0, "step": 1, "generation": 1, "parent": None, "tensors": [], "nbytes": 0,
                "world_size": 1000, "writer_bytes": {}, "values": values}  # fmt: skip
    manifest = type("M", (), {"step": 1})
    few = shown(inspect._page(document, manifest, listed=True, everything=False), 100)  # type: ignore[arg-type]
    assert few.count("rng") == 2
    assert "999 more ranks" in few
    assert "lr = 0.5" in few
    assert shown(inspect._page(document, manifest, listed=False, everything=True), 100).count("rng@") == 1000  # type: ignore[arg-type]


# -- standard streams ---------------------------------------------------------------------------------------


@pytest.mark.matrix
def test_a_closed_pipe_ends_a_command_quietly(root: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        for command in COMMANDS:
            done = program([root if word == "ROOT" else word for word in command], stdout=pipe, stderr=subprocess.PIPE)
            assert (done.returncode, done.stderr) == (141, ""), command


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_a_full_disk_behind_standard_output_is_an_error(root: str, as_json: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = program(["ls", root, *as_json], stdout=full, stderr=subprocess.PIPE)
        assert done.returncode == 74
        assert "Traceback" not in done.stderr
        assert program(["ls", root], stdout=full, stderr=full).returncode == 74
        assert program(["ls", f"{root}/none"], stdout=subprocess.DEVNULL, stderr=full).returncode == 13


@pytest.mark.matrix
def test_closed_standard_streams_are_no_error_and_no_file_takes_their_place(root: str, tmp_path: Path) -> None:
    target = tmp_path / "out.safetensors"
    for redirect in (">&-", "2>&-", "<&- >&- 2>&-"):
        command = f'"$0" -m flashckpt.cli.main export "$1" --to "$2" --force {redirect}'
        done = subprocess.run(
            ["sh", "-c", command, sys.executable, root, str(target)], check=False, capture_output=True
        )
        assert done.returncode == 0
        assert target.read_bytes()[8:9] == b"{"
        command = f'"$0" -m flashckpt.cli.main ls "$1/none" {redirect}'
        done = subprocess.run(["sh", "-c", command, sys.executable, root], check=False, capture_output=True)
        assert (done.returncode, b"Traceback" in done.stderr) == (13, False)


@pytest.mark.matrix
def test_a_locale_without_unicode_and_a_file_name_that_is_no_text(tmp_path: Path) -> None:
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environment.pop("HOME", None)
    for name in (os.fsencode(tmp_path) + b"/caf\xe9", os.fsencode(tmp_path) + "/é漢".encode()):
        for as_json in (False, True):
            command: list[str | bytes] = [
                sys.executable,
                "-m",
                "flashckpt.cli.main",
                "ls",
                name,
                *(["--json"] if as_json else []),
            ]
            done = subprocess.run(command, check=False, capture_output=True, env=environment)
            assert (done.returncode, b"Traceback" in done.stderr) == (10, False)  # its bytes are no text in that locale
            if as_json:
                assert json.loads(done.stdout)["error"]["type"] == "ConfigError"


def test_few_open_files_are_enough_or_an_error(root: str) -> None:
    for count in (3, 4, 8, 16):
        command = f'ulimit -n {count}; exec "$0" -m flashckpt.cli.main verify "$1"'
        done = subprocess.run(["sh", "-c", command, sys.executable, root], check=False, capture_output=True, text=True)
        if count >= 16:
            assert (done.returncode, "intact" in done.stdout) == (0, True)
        else:
            assert done.returncode != 32, "nothing is damaged"


def test_gc_names_what_was_kept() -> None:
    row = {"job": "j", "path": "/x", "age_s": 5.0, "nbytes": 7, "problem": "not all of it could be removed"}
    page = gc._page({"applied": True, "memory": [], "kept": [row], "left_alone": [], "storage": {}})
    text = shown(page, 120)
    assert "not all of it could be removed" in text
    assert "0 B removed" in text


def test_ctrl_c_while_the_command_is_being_imported_ends_it_quietly(capsys: Any, monkeypatch: Any) -> None:
    from flashckpt.cli import entry

    class Interrupted:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "flashckpt.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "flashckpt.cli.main", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 130
    assert "Traceback" not in capsys.readouterr().err
