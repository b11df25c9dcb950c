"""The race's pure parts: when failures strike, what a log of samples says, and the table of it."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from support.paths import ROOT


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "race"]:
        del sys.modules[name]


def race(name: str) -> Any:
    return importlib.import_module(f"race.{name}")


def step(number: int, ids: list[int], *, attempt: int = 1, rank: int = 0, t: float | None = None) -> dict[str, Any]:
    return {
        "event": "step", "s": number, "a": attempt, "r": rank, "w": 1, "ids": ids, "t": number if t is None else t,
    }  # fmt: skip


def test_failures_are_those_of_their_seed_and_of_no_other_kind() -> None:
    draw = race("failures").draw
    first, again, other = (draw(seed, 240, 2, 0.02) for seed in (7, 7, 8))
    assert first == again
    assert first != other
    assert {failure.rank for seed in range(20) for failure in draw(seed, 240, 2, 0.02).values()} == {0, 1}
    for failure in first.values():
        assert 0 < failure.step < 240
    assert first["disk"].sleep_s * 240 > race("failures").DISK_S  # else the run ends before there is room again
    assert first["rank"].sleep_s == 0


def test_a_step_counts_as_its_last_attempt_trained_it() -> None:
    lines = [step(1, [0, 1]), step(2, [2, 3]), step(2, [2, 3], attempt=2, t=9.0), step(3, [4, 5], attempt=2, t=11.0)]
    found = race("score").score([*lines, {"event": "end", "sha256": "abc"}], 6, 1)
    assert (found.done, found.again, found.lost, found.doubled, found.sha256) == (3, 1, 0, 0, "abc")
    assert found.seconds == 10.0


def test_samples_that_are_skipped_or_repeated_after_a_restart_are_counted() -> None:
    lines = [step(1, [0, 1]), step(2, [2, 3]), step(2, [0, 1], attempt=2)]  # the epoch began again
    found = race("score").score(lines, 4, 1)
    assert (found.again, found.lost, found.doubled) == (1, 2, 2)


def test_a_rank_that_is_missing_loses_its_samples() -> None:
    lines = [step(1, [0]), step(1, [1], rank=1), step(2, [2])]
    assert race("score").score(lines, 4, 1).lost == 1


def test_nothing_trained_loses_everything() -> None:
    assert race("score").score([], 4, 2).lost == 8


def test_each_rank_count_has_its_pace() -> None:
    lines = [step(n, [], t=float(n)) for n in range(1, 5)] + [
        step(n, [], attempt=2, t=3.0 * n + 50) for n in range(4, 7)
    ]
    assert race("score").ideal_s(lines, 6) == 2 * 1.0 + 3 * 3.0  # steps 2, 3, then 4, 5, 6


def test_half_a_line_of_a_killed_rank_is_no_line() -> None:
    text = json.dumps(step(1, [0])) + "\n" + json.dumps(step(2, [1]))[:-4]
    assert [line["s"] for line in race("score").lines_of(text)] == [1]


def test_runs_that_wait_come_first_with_brief_ones_behind_them() -> None:
    referee, draw = race("referee"), race("failures").draw(7, 120, 2, 0.02)
    some = [race("entrants").Entrant(name=name, venv="", script=(), waits_s=35.0 * (name != "e")) for name in "abcde"]
    asked = [(one, draw[kind], 120, 0.06, 20.0 * (kind == "none")) for kind in ("none", "rank", "hang") for one in some]
    found = [f"{one.name} {failure.kind}" for one, failure, *_ in referee.in_order(asked)]
    assert found[:8] == [
        "a hang", "b hang", "a none", "b none", "c hang", "d hang", "c none", "d none",
    ]  # fmt: skip
    assert sorted(found) == sorted(f"{one.name} {failure.kind}" for one, failure, *_ in asked)


def row(entrant: str, **changes: Any) -> dict[str, Any]:
    return {
        "entrant": entrant, "kind": "rank", "finished": True, "done": 240, "seconds": 12.0, "ratio": 1.5, "again": 3, "lost": 0, "doubled": 0,
        "equal": True, "distance": None, "written_bytes": 30_000_000, "peak_bytes": 5_000_000, "interventions": 0, **changes,
    }  # fmt: skip


def test_the_fastest_that_lost_nothing_leads_also_where_it_is_not_ours() -> None:
    rows = [
        row("flashckpt"),
        row("dcp", ratio=1.25),
        row("torch_save", ratio=1.1, lost=4),
        row("dlrover", finished=False),
    ]
    text = race("table").markdown(rows)
    assert text.count("**") == 2
    assert "| rank | torchrun + dcp.async_save | **1.25** | 2.4 | 3 | 0 / 0 | equal | 30 | 5 | 0 |" in text
    assert "not finished (240 steps)" in text


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, "equal"),
        ({"equal": False, "distance": 3e-7}, "3e-07 off"),
        ({"equal": False}, "other"),
        ({"finished": False}, "-"),
    ],
)
def test_weights_are_equal_or_said_to_be_off(changes: dict[str, Any], word: str) -> None:
    assert race("table").weights(row("dcp", **changes)) == word


def test_the_picture_shows_every_row() -> None:
    table = race("table")
    picture = table.svg(
        [row("flashckpt"), row("dcp", finished=False, interventions=3), row("dlrover", lost=2)], "t", ["n"]
    )
    assert picture.count("<rect") == 4
    assert "not finished, 3 by hand" in picture
    assert "2 lost, 0 doubled" in picture


def test_peers_see_nothing_of_flashckpt() -> None:
    for path in (ROOT / "benchmarks/race").glob("*.py"):
        if path.name not in ("referee.py", "engine_flashckpt.py"):
            assert "import flashckpt" not in path.read_text().replace('"import flashckpt"', ""), path
            assert "from flashckpt" not in path.read_text(), path


def test_readme_shows_the_published_race() -> None:
    matrix, _, _ = (ROOT / "benchmarks/results/2026-11-27/race.md").read_text().partition("\n\n")
    assert matrix in (ROOT / "README.md").read_text()
