"""Which published figures hold here, and what a save is worth: the pure parts of benchmarks/held.py and torn_savers.py."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
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


def test_every_figure_is_printed_by_its_page_and_is_in_its_json() -> None:
    held = program("held")
    for figure in held.FIGURES:
        assert figure.words in (ROOT / figure.page).read_text(), figure.name
        results = json.loads((PROGRAMS / "results" / figure.published).read_text())["results"]
        median, least, most = held.ratio(results, figure)
        assert least <= median <= most, figure.name


@pytest.mark.parametrize(
    ("here", "word"),
    [
        ((0.7, 0.6, 0.8), "holds"),
        ((0.9, 0.74, 1.0), "within reach"),
        ((1.34, 1.2, 1.9), "does NOT hold here"),
        ((0.3, 0.2, 0.4), "better here"),
    ],
)
def test_a_figure_holds_where_spreads_meet(here: tuple[float, float, float], word: str) -> None:
    assert program("held").verdict((0.70, 0.61, 0.75), here) == word


def test_a_quotient_is_as_wide_as_both_of_its_parts() -> None:
    held = program("held")
    one = {"median": 2.0, "min": 1.0, "max": 3.0}
    figure = held.Figure(
        name="x", page="", words="", published="", program=(), top="a/0/b", bottom="save, {gb} GB/c", depends=""
    )
    assert held.ratio({"a": [{"b": one}], "save, 4 GB": {"c": {"median": 4.0, "min": 2.0, "max": 5.0}}}, figure) == (
        0.5,
        0.2,
        1.5,
    )
    with pytest.raises(KeyError):
        held.found({"a": {"b": 1}}, "a/b")


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
