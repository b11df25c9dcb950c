"""Generated wrong command lines: one clear error each, a documented exit code, no traceback, and JSON that is JSON."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.daemons import two_checkpoints
from support.paths import ROOT

from flashckpt.cli import main as cli

SEED, CASES = 20261122, 300
DOCUMENTED = {
    int(code)
    for line in re.findall(r"^\| ([0-9, ]+) \|", (ROOT / "docs/cli.md").read_text(), re.MULTILINE)
    for code in line.split(",")
}
LONG, ESCAPES, BYTES = "x" * 300, "\x1b]0;title\x07[/][bold]", "caf\udce9"
NUMBERS = (
    "10",
    "20",
    "10.g1",
    "",
    "-1",
    "1.5",
    "٣",
    "²",
    "9" * 30,
    "9" * 5000,
    "10.g",
    "10.g²",
    "step-10",
    LONG,
    "1e3",
    "nan",
    "[/]",
)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[str]:
    """A root with steps 10 and 20, whose tensors have names that terminals and rich could trip over."""
    with two_checkpoints(tmp_path / "root", {"model.w": (50, 4), f"model.{ESCAPES}.b": (7,)}) as made:
        yield made


def roots(root: str, tmp_path: Path) -> list[str]:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("{}")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / ESCAPES.replace("/", "")).mkdir()
    names = ("empty", "file", "loop", "missing", LONG, f"root/{LONG}", ESCAPES.replace("/", ""), BYTES, "file/below")
    places = [str(tmp_path / name) for name in names]
    return (
        [root] * 8
        + places
        + ["/" + LONG, LONG * 20, "[/]", "ftp://x/y", "memory://x", "nosuch://x", "/dev/null", "a::b"]
    )


OPTIONS: dict[str, list[list[str]]] = {
    "ls": [],
    "inspect": [["--step", "N"], ["--all"], ["--coverage"], ["--plan", "L"]],
    "verify": [["--step", "N"], ["--all"]],
    "diff": [["--other", "R"]],
    "export": [["--to", "P"], ["--format", "F"], ["--step", "N"], ["--only", "T"], ["--strip", "T"], ["--rename", "T"],
               ["--dtype", "T"], ["--max-shard-size", "N"], ["--force"]],
    "import": [["--step", "N"], ["--format", "F"], ["--only", "T"], ["--rename", "T"]],
    "keep": [["--remove"]],
    "gc": [["--job", "T"], ["--keep-last", "N"], ["--keep-every", "N"]],
    "status": [["--job", "T"]],
    "bench": [["--size", "N"], ["--rounds", "N"], ["--small", "N"], ["--plot", "P"], ["--compression", "T"]],
    "plan": [["--gpus", "N"], ["--layout", "T"], ["--layout", "llama3-8b"], ["--gpus", "64"], ["--mtbf", "N"], ["--tp", "N"],
             ["--from", "P"], ["--slots", "N"], ["--plot", "P"], ["--storage-share", "N"], ["--step-time", "N"]],
}  # fmt: skip


def command_line(chosen: random.Random, places: list[str]) -> list[str]:
    """Return a command line with about the right number of arguments, of which about half are wrong."""
    name = chosen.choice(list(OPTIONS))
    texts = ["", "[/]", ESCAPES, BYTES, LONG, "=", "a=b", "model.=m", "*", "[", "bfloat16", "int7", "fake"]
    pools = {
        "N": list(NUMBERS), "R": places, "P": [*places, "out.pt", "out.safetensors", LONG + ".pt", LONG + ".png", "/dev/full"],
        "L": ["1x1x1", "2x2x2", "0x1x1", "x", "²x1x1", "1x1", f"{'9' * 5000}x1x1", ""], "F": ["torch", "dcp", "safetensors", "zip", ""],
        "T": texts,
    }  # fmt: skip
    line = [name] if name != "bench" else ["bench", chosen.choice(["store", "compare", "job", "nosuch"])]
    if name not in ("status", "plan", "gc") or chosen.random() < 0.3:
        line.append(chosen.choice(places))
    wanted = {"diff": "NN", "keep": "N", "import": "R"}.get(name, "")
    line += [chosen.choice(pools[kind]) for kind in wanted if chosen.random() < 0.9]
    options = OPTIONS[name]
    for option in chosen.sample(options, min(len(options), chosen.choice([0, 1, 1, 2, 3]))):
        line += [chosen.choice(pools[word]) if word in pools else word for word in option]
    if name == "bench" and line[1] in ("store", "job"):
        line += ["--rounds", "0"]  # never runs: only what is refused is of interest here
    line += chosen.choice([[], [], [], ["-o", "a"], ["-o", "a=b"], ["--nosuch"], ["extra"], ["-o", ESCAPES]])
    return line + chosen.choice([["--json"], []])


def test_generated_command_lines_end_in_one_clear_error_or_work(
    root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path / "root")
    places, chosen, seen = roots(root, tmp_path), random.Random(SEED), set()
    monkeypatch.chdir(tmp_path / "empty")
    wrong = []
    for number in range(CASES):
        line = command_line(chosen, places)
        with pytest.raises(SystemExit) as done:
            cli.main(line)
        out, err = capsys.readouterr()
        code = int(done.value.code or 0)
        seen.add((line[0], code))
        if problem := problem_of(line, code, out, err):
            wrong.append(f"case {number}: {line}: {problem}; exit code {code}\n{out[-500:]}\n{err[-2000:]}")
    assert not wrong, "\n".join(wrong)
    assert {name for name, code in seen if code == 0} >= {"ls", "inspect", "verify", "gc", "status"}
    assert len({code for _, code in seen}) >= 5


def problem_of(line: list[str], code: int, out: str, err: str) -> str:
    """Return what is wrong with an answer, "" if nothing is."""
    if code not in DOCUMENTED - {70, 74, 130, 141}:
        return "unexpected exit code"
    if "Traceback" in out + err:
        return "a traceback"
    if re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", out + err):
        return "a control character"
    if "--json" not in line:
        return "" if code in (0, 1, 32) or err.strip() else "no message"
    try:
        document = json.loads(out, parse_constant=float)
        json.dumps(document, allow_nan=False)
    except ValueError as error:
        return f"no JSON: {error}"
    return "another exit code in JSON" if document.get("error", {}).get("exit_code", code) != code else ""
