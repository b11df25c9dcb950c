"""The pictures of a recorded demo: what the screen showed, when, and how long each phase of the restart took."""

from __future__ import annotations

import json
import re
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree as ET

import pytest
from support.paths import ROOT

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def programs() -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import record_demo
    finally:
        sys.path.pop(0)
    return record_demo


def texts(svg: str) -> list[str]:
    return [node.text or "" for node in ET.fromstring(svg).iter(f"{SVG}text")]


def test_frames_are_what_the_screen_showed(programs: ModuleType) -> None:
    events = [(0.0, "one\r\n"), (0.1, "\x1b[32mtwo\x1b[0m"), (1.0, "\rtwo, and more"), (9.0, "\x1b[2J\x1b[Hend")]
    frames = programs.frames_of(events, 20, 3)
    assert [(frame.at_s, [run.text for row in frame.rows for run in row]) for frame in frames] == [
        (0.1, ["one", "two"]),
        (1.0, ["one", "two, and more"]),
        (9.0, ["end"]),
    ]
    assert frames[0].rows[1][0].colour == "green"
    played, shortened = programs.paced(frames, programs.Pacing(longest_pause_s=2.0))
    assert [round(frame.at_s, 3) for frame in played] == [0.0, 0.9, 2.9]
    assert shortened == 1


def test_the_animation_shows_each_row_from_when_to_when_it_was_there(programs: ModuleType) -> None:
    frames = programs.frames_of([(0.0, "a<b>&\r\n"), (2.0, "later"), (4.0, "\x1b[2J\x1b[Hlast \u2603")], 30, 4)
    svg = programs.animated_svg(frames, 30, "title & more", ["a note"])
    assert set(texts(svg)) == {"a<b>&", "later", "last \u2603", "a note"}
    end_s = 4.0 + 6.0
    spans = re.findall(r"@keyframes k\d+\{(.*?\})\}", svg)
    assert any(f"{100 * 2 / end_s:.3f}%{{visibility:visible}}" in one for one in spans), "the second row from 2 s on"
    assert svg.count("visibility:hidden;animation-name") == 2, "without animation the last frame alone is shown"
    assert "<script" not in svg
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")


def test_bytes_that_are_no_text_for_xml_are_not_in_the_picture(programs: ModuleType) -> None:
    frames = programs.frames_of([(0.0, "a\x00b\x07\ufffe c")], 20, 2)
    ET.fromstring(programs.animated_svg(frames, 20, "\x1b]0;x\x07", ["\x00"]))


def test_the_timeline_has_a_bar_for_each_phase_one_behind_the_other(programs: ModuleType) -> None:
    seconds = {"detect": 0.01, "stop": 0.09, "fork": 0.2, "restore": 0.3, "first_step": 0.4, "recompute": 9.0}
    record = {"rank": 5, "seconds": seconds, "steps_lost": 3}
    svg = programs.timeline_svg(record, "title", [])
    bars = [node for node in ET.fromstring(svg).iter(f"{SVG}rect") if node.get("rx") == "2"]
    assert len(bars) == 5, "what was trained again is not part of the restart"
    for one, other in pairwise(bars):
        end = float(one.get("x", 0)) + float(one.get("width", 0))
        assert float(other.get("x", 0)) == pytest.approx(end, abs=0.3)
    widths = [float(bar.get("width", 0)) for bar in bars]
    assert widths[4] / widths[2] == pytest.approx(2.0, rel=1e-2)
    assert any(text.startswith("in all 1.000 s") for text in texts(svg))
    assert any(
        text.startswith("in all 0.900 s") for text in texts(programs.timeline_svg(record | {"total_s": 0.9}, "", []))
    )
    with pytest.raises(ValueError, match="no next step"):
        programs.timeline_svg({"rank": 5, "seconds": {"detect": 0.1}}, "title", [])


def test_a_program_is_recorded_and_drawn_from_its_recording(programs: ModuleType, tmp_path: Path) -> None:
    header = {"version": 2, "width": 40, "height": 4, "date": "2000-01-01", "machine": "a machine"}
    program = "import os, sys; print(sys.stdout.isatty(), os.get_terminal_size().columns); sys.exit(3)"
    recording, ledger = tmp_path / "demo.cast", tmp_path / "ledger.jsonl"
    assert programs.record([sys.executable, "-c", program], recording, header) == 3
    found, events = programs.read_recording(recording)
    assert found == header
    assert "".join(text for _, text in events) == f"True {programs.COLUMNS}\r\n"
    ledger.write_text(json.dumps({"rank": 5, "steps_lost": 2, "seconds": {"fork": 0.5, "first_step": 0.5}}) + "\n")
    programs.draw(recording, ledger, tmp_path / "assets")
    for name, expected in (("demo.svg", f"True {programs.COLUMNS}"), ("restart.svg", "fork")):
        shown = texts((tmp_path / "assets" / name).read_text())
        assert any(expected in text for text in shown)
        assert "recorded on 2000-01-01: a machine" in shown


def test_the_pictures_of_the_docs_are_small_and_well_formed() -> None:
    for name in ("demo.svg", "restart.svg"):
        svg = (ROOT / "docs" / "assets" / name).read_text()
        assert len(svg) < 300_000
        assert any(text.startswith("recorded on ") for text in texts(svg))
