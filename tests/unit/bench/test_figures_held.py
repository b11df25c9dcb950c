"""Which published figures hold here, and what a save is worth: the pure parts of benchmarks/held.py and torn_savers.py."""

from __future__ import annotations

import importlib
import json
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT

PROGRAMS = ROOT / "benchmarks"


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", [str(PROGRAMS), *sys.path])
    yield
    for name in [
        name for name in sys.modules if (PROGRAMS / f"{name.partition('.')[0]}.py").exists() or name.startswith("race")
    ]:
        del sys.modules[name]


def program(name: str) -> Any:
    return importlib.import_module(name)


def test_every_figure_is_printed_as_its_json_says() -> None:
    held = program("held")
    assert [words for figure in held.FIGURES if (words := held.differs(figure))] == []
    for figure in (figure for figure in held.FIGURES if figure.program):
        median, least, most = held.ratio(held.published_of(figure)["results"], figure)
        assert least <= median <= most, figure.name


def test_every_measured_row_of_the_readme_is_a_figure() -> None:
    """A row of its tables that no JSON stands behind could say anything."""
    held = program("held")
    _, _, rest = (ROOT / "README.md").read_text().partition("## Measured")
    page, _, _ = rest.partition("\n## ")
    matrix, _, _ = (ROOT / "benchmarks/results/2026-11-27/race.md").read_text().partition("\n\n")
    rows = [row for row in page.splitlines() if re.search(r"\|.*\d", row) and row not in matrix.splitlines()]
    known = [
        held.said(held.published_of(figure)["results"], figure) for figure in held.FIGURES if figure.page == "README.md"
    ]
    assert len(rows) >= 7
    assert [row for row in rows if not any(words in row for words in known)] == []


def test_the_published_race_is_that_of_its_json() -> None:
    table = importlib.import_module("race.table")
    made = json.loads((PROGRAMS / "results/2026-11-27/race.json").read_text())["results"]["rows"]
    assert table.matrix(made) in (PROGRAMS / "results/2026-11-27/race.md").read_text()


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (".2f", "0.27"),
        ("*.2f s~", "**0.27 s** [0.18-0.36]"),
        (".0f ms", "270 ms"),
        (".0f%~", "27% [18-36]"),
        (",.0f", "0"),
    ],
)
def test_a_figure_is_said_as_pages_say_it(spec: str, text: str) -> None:
    assert format(program("held_figures").Said((0.27, 0.18, 0.36)), spec) == text


def test_a_page_with_other_words_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = program("held")
    figure = next(figure for figure in held.FIGURES if figure.name == "restart, 1 MB")
    (tmp_path / "README.md").write_text("| **0.26 s** [0.18-0.36] | 4.6 s [4.1-5.3], torchrun |")
    monkeypatch.setattr(held, "ROOT", tmp_path)
    assert "does not say '| **0.27 s** [0.18-0.36]" in held.differs(figure)


@pytest.mark.parametrize(
    ("here", "word", "busy_word"),
    [
        ((0.7, 0.6, 0.8), "holds", "holds"),
        ((0.9, 0.74, 1.0), "within reach", "within reach"),
        ((1.34, 1.2, 1.9), "does NOT hold here", "not judged: BUSY"),
        ((0.3, 0.2, 0.4), "better here", "not judged: BUSY"),
    ],
)
def test_a_figure_holds_where_spreads_meet(here: tuple[float, float, float], word: str, busy_word: str) -> None:
    verdict = program("held").verdict
    assert verdict((0.70, 0.61, 0.75), here) == word
    assert verdict((0.70, 0.61, 0.75), here, busy=True) == busy_word


def test_every_figure_gets_time_on_a_machine_on_which_none_is_ever_through() -> None:
    held = program("held")
    left_s = 1680.0
    for number in range(10, 0, -1):
        limit_s = held.share_s(left_s, number)
        assert limit_s > held.SHORTEST_S
        left_s -= limit_s
    assert left_s >= 0


def test_the_last_line_says_how_many_figures_say_nothing() -> None:
    rows = [{"verdict": "holds"}, {"verdict": "not judged: BUSY"}, {"verdict": "not measured"}, {"verdict": "holds"}]
    counts, advice = program("held").summed(rows).split("\n")
    assert counts == "2 holds; 1 not judged: BUSY; 1 not measured"
    assert advice.startswith("2 say nothing")


def test_a_quotient_is_as_wide_as_both_of_its_parts() -> None:
    held = program("held_figures")
    one = {"median": 2.0, "min": 1.0, "max": 3.0}
    figure = held.Figure(
        name="x", page="", words="", sources=(), published="", top="a/0/b", bottom="save, {gb} GB/c", depends=""
    )
    assert held.ratio({"a": [{"b": one}], "save, 4 GB": {"c": {"median": 4.0, "min": 2.0, "max": 5.0}}}, figure) == (
        0.5,
        0.2,
        1.5,
    )
    with pytest.raises(KeyError):
        held.found({"a": {"b": {}}}, "a/b")


def test_paths_name_lists_and_keys_with_a_stroke() -> None:
    found = program("held_figures").found
    assert found({"r": [{"x": 1.0}, {"x": 5.0}, {"x": 2.0}, {"x": 4.0}]}, "r/*/x") == (3.0, 1.0, 5.0)
    assert found({"a / b": {"c": 2.5}}, "a / b/c") == (2.5, 2.5, 2.5)


SLOW = """
import argparse, subprocess, sys, time
from pathlib import Path
parser = argparse.ArgumentParser()
parser.add_argument("--json")
print(parser.parse_args().json, file=sys.stderr)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
Path("{pids}").write_text(str(child.pid))
time.sleep(600)
"""


def test_a_program_that_takes_too_long_is_ended_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = program("held")
    pids = tmp_path / "pid"
    (tmp_path / "slow.py").write_text(SLOW.replace("{pids}", str(pids)))
    monkeypatch.setattr(held, "HERE", tmp_path)
    figure = replace(held.FIGURES[0], program=("slow.py",))
    limit_s = 1.0
    while not pids.exists():  # until the child had the time to be there
        with pytest.raises(RuntimeError, match="was not through after"):
            held.measure(figure, quick=False, limit_s=limit_s)
        limit_s *= 2
    pid = int(pids.read_text())
    end = time.monotonic() + 30
    while is_running(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_running(pid)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("claimed", "values", "wanted", "word"),
    [
        (3, [3.0], 3, "right"),
        (3, [3.0], None, "right"),
        (3, [3.0, 4.0], 3, "wrong"),
        (3, [4.0], None, "wrong"),
        (2, [2.0], 3, "wrong"),  # another step than was asked for
        (None, [], 3, "error"),
    ],
)
def test_what_was_loaded_is_judged(claimed: int | None, values: list[float], wanted: int | None, word: str) -> None:
    assert program("torn_savers").judged(claimed, values, wanted) == word


def test_files_whose_names_differ_in_numbers_are_of_one_kind() -> None:
    kinds = program("torn_savers").kinds_of(["a/step_1/__0_0.distcp", "a/step_1/__1_0.distcp", "a/step_1/.metadata"])
    assert kinds == {"__N_N.distcp": "a/step_1/__0_0.distcp", ".metadata": "a/step_1/.metadata"}


def test_the_table_of_savers_counts_what_is_wrong_without_an_error() -> None:
    found = {"steps": ["right", "wrong"], "kills": ["error", "right"], "bits": {"a": "error", "b": "error"}}
    assert program("torn_savers").row("x", found) == "| x | **1 of 2** | 0 of 2, 1 errors | 0 of 2, 2 errors |"


def test_savers_that_are_not_measured_again_keep_their_results(tmp_path: Path) -> None:
    path = tmp_path / "torn.json"
    assert program("torn_savers").kept(path) == {}
    path.write_text(json.dumps({"results": {"DLRover": {"steps": ["right"]}}}))
    assert program("torn_savers").kept(path) == {"DLRover": {"steps": ["right"]}}
