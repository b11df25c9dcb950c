"""The live display: what it shows, where it is drawn, and that nothing on its terminal is lost or ends the run."""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from support.agents import pretend_agent
from support.ranks import wait_for
from support.screen import Terminal, terminal

from flashckpt.shm import agent_folder
from flashckpt.trainer.train.metrics import StepRecord
from flashckpt.trainer.train.nonfatal import CLEAR, NonfatalStream, nonfatal_streams, report_once, terminal_of
from flashckpt.trainer.watch import panel
from flashckpt.trainer.watch.engine import KEPT, Event, Events
from flashckpt.trainer.watch.figures import Figures, ProgressLine, duration
from flashckpt.trainer.watch.live import LiveDisplay

RECORD: dict[str, Any] = {"norm": 1.25, "rate": 0.1, "tokens": 64, "samples": "ab", "seconds": 2.0, "loss": 2.5}
FIGURES = Figures(
    tokens_per_s=12345.0, mfu=0.412, device_gib=61.2, host_gib=3.25, snapshot=20, committed=10, lag=10, restarts=2
)
XTERM = {"TERM": "xterm-256color"}


def record(step: int, **other: Any) -> StepRecord:
    return StepRecord(step=step, **{**RECORD, **other})


def view(events: int = 0, **other: Any) -> panel.View:
    happened = [Event(step=n, text=f"thing {n} happened", time_s=1e9) for n in range(events)]
    values = {"record": record(25, channels={"code": 2.25}), "figures": FIGURES, **other}
    return panel.View(steps=100, left_s=150.0, events=happened, **values)


def plain(lines: list[str]) -> list[str]:
    from rich.text import Text

    return [Text.from_ansi(line).plain.rstrip() for line in lines]


# -- what it shows


def test_the_display_shows_everything_about_the_last_step() -> None:
    bar, speed, memory, state, *events = plain(panel.render(view(2), width=100, height=30))
    assert bar.startswith("step 25/100 ")
    assert bar.endswith(" 25%  eta 2m30s")
    assert speed == "loss 2.5000   rate 1.00e-01   norm 1.25   tok/s 12,345   mfu 41.2%"
    assert memory == "device 61.20 GiB   host 3.25 GiB   code 2.2500"
    assert state == "snapshot 20 (held 0.0 ms)   checkpoint 10 (10 behind)   restarts 2"
    assert [text[8:] for text in events] == ["  step 0: thing 0 happened", "  step 1: thing 1 happened"]


def test_what_is_not_known_is_not_shown() -> None:
    unknown = view(figures=Figures(tokens_per_s=1.0), record=record(1, skipped=True))
    _, speed, memory, state = plain(panel.render(unknown, width=100, height=30))
    assert speed.startswith("loss 2.5000  skipped ")
    assert "mfu" not in speed
    assert memory == ""
    assert state == "snapshot none (held 0.0 ms)   checkpoint ?   restarts 0"
    first = plain(panel.render(view(record=None, figures=None), width=100, height=30))
    assert "the first step is under way" in first[0]


@pytest.mark.parametrize("width", [20, 40, 81, 300])
@pytest.mark.parametrize("height", [2, 5, 9, 50])
def test_the_display_is_never_wider_or_higher_than_its_terminal(width: int, height: int) -> None:
    lines = plain(panel.render(view(5), width=width, height=height))
    assert len(lines) < max(2, height)
    assert all(len(line) < width for line in lines)
    assert len(lines) == 9 or height < 50


def test_a_terminal_that_is_not_unicode_gets_a_bar_that_it_can_show() -> None:
    assert all(line.isascii() for line in panel.render(view(2), width=80, height=30, encoding="ascii"))


def test_events_are_the_newest_ones_of_each_frequent_kind_only_the_last() -> None:
    events = Events()
    events.add(1, "committed 1", kind="commit")
    for step in range(2, 5):
        events.add(step, f"note \x1b[2J {step}")
    events.add(5, "committed 5", kind="commit")
    assert [event.text for event in events.newest(9)] == [
        *(rf"note \x1b[2J {n}" for n in (2, 3, 4)),
        "committed 5",
    ]
    assert [event.step for event in events.newest(1)] == [5]
    assert events.newest(0) == []
    for step in range(100):
        events.add(step, "x")
    assert len(events.newest(1000)) == KEPT


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0m00s"), (45.9, "0m45s"), (3599, "59m59s"), (11220, "3h07m"), (190800, "2d05h")]
)
def test_durations_have_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# -- where it is drawn


class Tty(io.StringIO):
    def isatty(self) -> bool:
        super().isatty()  # an error where it is closed
        return True

    def fileno(self) -> int:
        raise OSError


def streams(monkeypatch: Any, *, out: bool, err: bool) -> None:
    monkeypatch.setattr(sys, "stdout", Tty() if out else io.StringIO())
    monkeypatch.setattr(sys, "stderr", Tty() if err else io.StringIO())


@pytest.mark.parametrize(
    ("display", "environ", "is_live"),
    [
        ("auto", XTERM, True),
        ("plain", XTERM, False),
        ("auto", {**XTERM, "CI": "true"}, False),
        ("auto", {**XTERM, "NO_COLOR": "1"}, False),
        ("auto", {**XTERM, "NO_COLOR": ""}, True),
        ("auto", {"TERM": "dumb"}, False),
        ("auto", {}, False),
        ("live", {"TERM": "dumb", "CI": "1", "NO_COLOR": "1"}, True),
    ],
)
def test_a_terminal_gets_the_live_display_unless_it_is_not_wanted(
    monkeypatch: Any, display: str, environ: dict[str, str], is_live: bool
) -> None:
    streams(monkeypatch, out=True, err=True)
    assert terminal_of(display, environ) is (sys.stderr if is_live else None)
    streams(monkeypatch, out=True, err=False)
    assert terminal_of(display, environ) is (sys.stdout if is_live else None)
    streams(monkeypatch, out=False, err=False)
    assert terminal_of(display, environ) is None


def test_a_closed_stream_is_no_terminal(monkeypatch: Any) -> None:
    streams(monkeypatch, out=False, err=True)
    sys.stderr.close()
    sys.stdout.close()
    assert terminal_of("live", XTERM) is None


# -- on a terminal


def display_on(at: Terminal, events: Events | None = None) -> LiveDisplay:
    with at.stream() as stream:  # the descriptor is kept by its number
        found = LiveDisplay(stream, steps=100, events=events or Events())
        found._fd = at.end
    return found


def shown(at: Terminal, text: str) -> bool:
    at.read(0.02)
    return any(text in line for line in at.screen.lines)


def test_lines_of_every_process_stand_above_the_display_whole_and_once(capsys: Any) -> None:
    with terminal() as at:
        display = display_on(at)
        foreign = NonfatalStream(at.stream(), "standard error", over_display=True)
        said = []
        for step in range(1, 8):
            display.show(record(step), FIGURES)
            wait_for(lambda step=step: shown(at, f"step {step}/100 "), what=f"step {step}")  # type: ignore[misc]  # bound now
            for number in range(step % 4):
                said.append(f"line {number} of step {step}: {'x' * 10 * number}|")
                print("line", number, "of step", f"{step}:", "x" * 10 * number + "|", file=foreign)
        said.append("a C library writes one line without asking")
        os.write(at.end, f"{said[-1]}\n".encode())
        display.show(record(50), FIGURES)
        wait_for(lambda: shown(at, "step 50/100 "), what="another drawing")
        at.resize(60, 10)
        display.show(record(51), FIGURES)
        wait_for(lambda: shown(at, "step 51/100 "), what="a drawing in the smaller window")
        assert [line for line in at.screen.lines if line.startswith(("line", "a C"))] == said
        assert len(at.screen.lines) == len(said) + panel.FIXED_LINES
        display.close()
        foreign.close()
        at.read(0.1)
        assert at.screen.lines[: len(said)] == said
        assert "".join(at.screen.lines[len(said) :]).startswith("step 51/100  loss 2.5000")
        assert (at.screen.column, at.screen.row) == (0, len(at.screen.rows) - 1)
        assert "\x1b[?25l" not in at.written  # a rank that is killed could not show the cursor again


def test_a_line_is_written_over_the_display_in_one_piece() -> None:
    class Written(list[str]):
        encoding = "utf-8"
        write = list.append

        def flush(self) -> None:
            pass

        def fileno(self) -> int:
            raise OSError

    out = Written()
    stream = NonfatalStream(out, "standard error", over_display=True)  # type: ignore[arg-type]  # enough of a stream
    print("one", 2, file=stream)
    stream.write("three")
    stream.write(" four\nfi")
    assert out == [f"{CLEAR}one 2\n", f"{CLEAR}three four\n"]
    stream.report()
    assert out[2:] == [f"{CLEAR}fi\n"]


def test_streams_that_are_no_terminals_are_written_as_ever(monkeypatch: Any, capsys: Any) -> None:
    with nonfatal_streams(over_display=True):
        print("begun", end="", file=sys.stderr)
    assert capsys.readouterr().err == "begun"


def test_an_error_of_a_rank_stands_clean_where_another_one_draws(monkeypatch: Any, tmp_path: Path) -> None:
    from flashckpt.errors import ConfigError

    monkeypatch.setenv("FLASHCKPT_AGENT_DIR", pretend_agent(tmp_path))
    with terminal() as at, at.stream() as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        display = display_on(at)
        assert agent_folder.has_display(tmp_path)
        display.show(record(3), FIGURES)
        wait_for(lambda: shown(at, "step 3/100 "), what="the display")
        display._is_gone = True  # as if killed
        report_once(ConfigError("wrong", found="this", expected="that"))
        at.read(0.1)
        found = [line.strip() for line in at.screen.lines]
        assert found == ["ConfigError: wrong", "found:    this", "expected: that", "exit code 10"]
        display.close()
    assert agent_folder.forget_display(tmp_path)
    assert not agent_folder.forget_display(tmp_path)


def test_a_closed_terminal_ends_the_display_and_nothing_else(caplog: Any) -> None:
    before = signal.getsignal(signal.SIGHUP)
    assert before == signal.SIG_DFL  # or this test would end with it
    with terminal() as at:
        display = display_on(at)
        display.show(record(1), FIGURES)
        wait_for(lambda: shown(at, "step 1/100 "), what="the display")
        os.kill(os.getpid(), signal.SIGHUP)
        at.hang_up()
        display.show(record(2), FIGURES)
        wait_for(lambda: not display._thread.is_alive(), what="the end of the thread")
        display.close()
    assert signal.getsignal(signal.SIGHUP) == before


def test_a_terminal_that_goes_without_a_signal_ends_the_display_too() -> None:
    with terminal() as at:
        display = display_on(at)
        at.hang_up()
        wait_for(lambda: not display._thread.is_alive(), what="the end of the thread")
        display.close()


def test_without_rich_there_are_plain_lines(monkeypatch: Any, tmp_path: Path, caplog: Any) -> None:
    from support.training import run_config

    from flashckpt.trainer.watch import reporter

    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.delitem(sys.modules, "flashckpt.trainer.watch.panel")
    monkeypatch.delattr("flashckpt.trainer.watch.panel")
    with terminal() as at, at.stream() as stream, caplog.at_level(logging.WARNING):
        monkeypatch.setattr(sys, "stderr", stream)
        found = reporter._display(run_config(tmp_path, log={"display": "live"}), Events())
        assert isinstance(found, ProgressLine)
    assert "no live display" in caplog.text
