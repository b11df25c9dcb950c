"""A disk or a pipe that takes nothing costs lines, counted and reported; never a run, and never a resume."""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.agents import pretend_agent
from support.training import run_config, write_corpus

from flashckpt.errors import FINAL_CODES, ConfigError, FlashckptError
from flashckpt.trainer.config import to_toml
from flashckpt.trainer.evaluate.results import Scores
from flashckpt.trainer.generate.samples import Sample
from flashckpt.trainer.parallel.distributed import note_restore
from flashckpt.trainer.train.metrics import StepRecord, Trace, read_trace
from flashckpt.trainer.train.nonfatal import LineFile, Nonfatal, NonfatalStream, report_once
from flashckpt.trainer.watch.figures import Figures, ProgressLine
from flashckpt.trainer.watch.reporter import BOARD_PATIENCE, Board, Reporter

RECORD: dict[str, Any] = {"norm": 1.0, "rate": 0.1, "tokens": 64, "samples": "ab", "seconds": 0.5, "loss": 2.0}


class Full(io.StringIO):
    """A text stream without room, until there is some."""

    full = True

    def write(self, text: str) -> int:
        if self.full:
            raise OSError(28, "No space left on device")
        return super().write(text)


@contextmanager
def no_file_longer_than(nbytes: int) -> Iterator[None]:
    """A full disk without root: this process can make no file longer than this."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def line(step: int) -> str:
    return StepRecord(step=step, **RECORD).to_line()


def test_lost_lines_are_counted_and_reported_when_writing_works_again_and_at_the_end() -> None:
    said: list[str] = []
    writing, out = Nonfatal("the log", said.append), Full()
    for _ in range(3):
        assert not writing.attempt(lambda: out.write("x"))
    assert said == ["the log cannot be written (No space left on device): lines are lost until it can"]
    out.full = False
    assert writing.attempt(lambda: out.write("x"))
    assert said[1:] == ["the log: 3 lines were lost before writing worked again (No space left on device)"]
    out.full = True
    writing.attempt(lambda: out.write("x"), lines=2)
    writing.report()
    writing.report()
    assert said[3:] == ["the log: 2 lines were lost (No space left on device)"]


def test_a_stream_without_room_or_closed_raises_nothing_and_says_what_it_lost() -> None:
    full = Full()
    stream = NonfatalStream(full, "standard error")
    print("one\ntwo", file=stream)
    stream.flush()
    full.full = False
    print("three", file=stream)
    assert full.getvalue().splitlines() == [
        "three",
        "standard error: 2 lines were lost before writing worked again (No space left on device)",
    ]
    full.close()
    stream.write("four\n")
    stream.report()


def test_a_line_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "log" / "lines")
    file.write("0123456789")
    with no_file_longer_than(16):
        file.write("abcdefghij")  # half of it would fit
    file.write("0123456789")
    file.close()
    assert (tmp_path / "log" / "lines").read_text() == "0123456789\n0123456789\n"


def test_a_full_log_disk_costs_lines_of_the_trace_and_the_run_goes_on(tmp_path: Path, caplog: Any) -> None:
    trace = Trace(tmp_path, 0)
    trace.write(line(1))
    with no_file_longer_than((tmp_path / "trace.jsonl").stat().st_size + 10):
        trace.write(line(2))
        trace.write(line(3))
    trace.write(line(4))
    trace.close()
    assert [entry["step"] for entry in read_trace(tmp_path / "trace.jsonl")] == [1, 4]
    assert "2 lines were lost before writing worked again" in caplog.text


def test_a_full_log_disk_at_a_resume_still_leaves_no_step_twice(tmp_path: Path, caplog: Any) -> None:
    trace = Trace(tmp_path, 0)
    for step in range(1, 6):
        trace.write(line(step))
    trace.close()
    with no_file_longer_than(0):
        trace = Trace(tmp_path, 3)  # the abandoned lines have nowhere to go; the trace is cut all the same
        trace.write(line(4))
    trace.write(line(5))
    trace.close()
    assert [entry["step"] for entry in read_trace(tmp_path / "trace.jsonl")] == [1, 2, 3, 5]
    assert "abandoned.jsonl: 2 lines were lost" in caplog.text
    assert "trace.jsonl: 1 lines were lost" in caplog.text


def test_a_log_folder_that_cannot_be_made_costs_every_line_until_it_can(tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "log").write_text("in the way")
    config = run_config(tmp_path, eval={"every": 1})
    reporter = Reporter(config, world=1, after=0)
    reporter.step(StepRecord(step=1, **RECORD))
    reporter.scores(1, Scores())
    reporter.spike(1, 2.0, 1.0, [1, 2], "warn")
    (tmp_path / "log").unlink()
    reporter.step(StepRecord(step=2, **RECORD))
    reporter.close()
    assert [entry["step"] for entry in read_trace(tmp_path / "log" / "trace.jsonl")] == [2]
    for name in ("trace", "eval", "spikes"):
        assert f"{name}.jsonl: 1 lines were lost" in caplog.text


def test_a_damaged_line_of_the_trace_does_not_end_a_resume(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text(line(1) + "\nnot JSON\n" + line(2) + "\n" + line(3) + "\n")
    Trace(tmp_path, 2).close()
    assert [text[:8] for text in (tmp_path / "trace.jsonl").read_text().splitlines()] == [
        '{"step":',
        "not JSON",
        '{"step":',
    ]
    assert len((tmp_path / "abandoned.jsonl").read_text().splitlines()) == 1


def test_a_restore_that_cannot_be_noted_is_reported(tmp_path: Path, caplog: Any) -> None:
    from flashckpt.report import RestoreReport

    (tmp_path / "file").write_text("")
    report = RestoreReport.__new__(RestoreReport)
    for name, value in {"life": 1, "step": 5, "tier_bytes": {}, "seconds": {}, "is_same_layout": True}.items():
        object.__setattr__(report, name, value)
    note_restore(str(tmp_path / "file"), report)
    assert "restores.jsonl cannot be written (Not a directory)" in caplog.text or "File exists" in caplog.text


def test_a_progress_line_that_cannot_be_shown_is_counted(monkeypatch: Any) -> None:
    full = Full()
    monkeypatch.setattr(sys, "stderr", full)
    progress = ProgressLine(steps=9, every=1)
    progress.show(StepRecord(step=1, **RECORD), Figures(tokens_per_s=128))
    full.full = False
    progress.show(StepRecord(step=2, **RECORD), Figures(tokens_per_s=128))
    progress.close()
    assert full.getvalue().startswith("step 2/9")
    assert "standard error: 1 lines were lost" in full.getvalue()


def test_an_error_that_cannot_be_shown_keeps_its_exit_code(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "stderr", Full())
    monkeypatch.setenv("FLASHCKPT_AGENT_DIR", pretend_agent(tmp_path))
    report_once(ConfigError("wrong"))
    assert (tmp_path / "refused").read_text() == str(ConfigError.exit_code)


def family(cls: type[FlashckptError]) -> list[type[FlashckptError]]:
    return [cls, *(one for sub in cls.__subclasses__() for one in family(sub))]


def test_what_no_restart_changes_is_the_launchers_list(monkeypatch: Any, tmp_path: Path, capsys: Any) -> None:
    """Every rank meets such an error alike, so rank 0 alone shows it; dlrun hears of it by `refused`."""
    kinds = {one.exit_code: one for one in family(FlashckptError) if one.__module__ == "flashckpt.errors"}
    assert {*FINAL_CODES} <= {*kinds}
    monkeypatch.setenv("RANK", "1")
    for code, kind in kinds.items():
        monkeypatch.delenv("FLASHCKPT_AGENT_DIR", raising=False)
        report_once(kind("wrong"))
        assert bool(capsys.readouterr().err) == (code not in FINAL_CODES)
        (folder := tmp_path / str(code)).mkdir()
        monkeypatch.setenv("FLASHCKPT_AGENT_DIR", pretend_agent(folder))
        report_once(kind("wrong"))
        capsys.readouterr()
        assert (folder / "refused").exists() == (code in FINAL_CODES)


class Curves:
    """Stands for tensorboard's writer, which raises in the call after its thread has failed."""

    made: list[Curves] = []  # noqa: RUF012 -- one list for all on purpose
    full = True

    def __init__(self, log_dir: str, purge_step: int, flush_secs: int) -> None:
        self.purge_step, self.points = purge_step, list[Any]()
        Curves.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        if Curves.full and step > 1:
            raise OSError(28, "No space left on device")
        self.points.append((name, step))

    def close(self) -> None:
        if Curves.full:
            raise OSError(28, "No space left on device")


def test_tensorboard_without_room_is_tried_again_later_and_its_points_are_counted(
    tmp_path: Path, caplog: Any, monkeypatch: Any
) -> None:
    module = pytest.importorskip("torch.utils.tensorboard")
    monkeypatch.setattr(module, "SummaryWriter", Curves)
    monkeypatch.setattr(Curves, "made", [])
    board = Board(str(tmp_path), 0)
    board.add({"loss": 1.0}, 1)
    for step in range(2, 12):
        board.add({"loss": 1.0, "norm": 1.0}, step)
    assert len(Curves.made) == 1  # not a writer for each step
    monkeypatch.setattr(Curves, "full", False)
    for step in range(12, 12 + BOARD_PATIENCE):
        board.add({"loss": 1.0, "norm": 1.0}, step)
    board.close()
    assert [writer.purge_step for writer in Curves.made] == [1, 2]  # nothing behind the last point is drawn twice
    assert Curves.made[1].points
    lost = 2 * (10 + BOARD_PATIENCE) - len(Curves.made[1].points)
    assert f"{lost} lines were lost before writing worked again" in caplog.text


# -- whole runs


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: Any) -> Any:
    folder = tmp_path_factory.mktemp("outputs")
    return folder, write_corpus(folder / "text")


def command(corpus: Any, name: str, **sections: Any) -> list[str]:
    folder, source = corpus
    sections = {"log": {"folder": str(folder / name), "every": 1, "tensorboard": True}, **sections}
    checkpoint = {"root": str(folder / name / "root"), "job": f"test-outputs-{name}", "snapshot_every": 2}
    config = run_config(
        folder,
        data={"source": source, "holdout_every": 4},
        eval={"every": 2, "batches": 1},
        checkpoint=checkpoint,
        **sections,
    )
    (folder / f"{name}.toml").write_text(to_toml(config))
    return [sys.executable, "-m", "flashckpt.trainer", "--config", str(folder / f"{name}.toml")]


@pytest.mark.parametrize(("streams", "unbuffered"), [("stderr", ""), ("stdout", ""), ("both", "1")])
def test_a_run_and_its_resume_end_well_on_full_streams(
    corpus: Any, streams: str, unbuffered: str, shm_dir: Any
) -> None:
    name = f"{streams}{unbuffered}"
    words = command(corpus, name)
    for steps in (3, 6):
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(
                [*words, "--train.steps", str(steps)],
                stdout=full if streams != "stderr" else subprocess.DEVNULL,
                stderr=full if streams != "stdout" else subprocess.DEVNULL,
                env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
                check=False,
            )
        assert done.returncode == 0
    trace = read_trace(corpus[0] / name / "trace.jsonl")
    assert [entry["step"] for entry in trace] == [1, 2, 3, 4, 5, 6]
    (restored,) = (json.loads(text) for text in (corpus[0] / name / "restores.jsonl").read_text().splitlines())
    assert restored["step"] == 3, "the last step of the first run, whatever persist_every is"


def test_a_run_says_its_plan_and_how_long_it_took_to_start_and_profiles_what_is_asked(
    corpus: Any, shm_dir: Any
) -> None:
    words = command(corpus, "profiled", log={"folder": str(corpus[0] / "profiled"), "every": 1, "peak_tflops": 0.1})
    said = []
    for steps, more in ((5, ["--profile", "2:4", "--profile-phases", "1"]), (8, [])):
        done = subprocess.run([*words, "--train.steps", str(steps), *more], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("plan: ") == done.stderr.count("the process began") == 1
        assert "on the fullest rank (parameters" in done.stderr
        assert "FLOPs per token, MFU of " in done.stderr
        assert "% (plan " in done.stderr  # the MFU of a step beside it
        said.append(done.stderr)
    assert "the process began (cold): imports " in said[0]
    assert said[0].count("phases of 1 ranks, means of 1 steps") == said[0].count("Not hidden behind forward") == 1
    assert "weights" in said[0].partition("process began")[2].splitlines()[0]
    assert "the process began (restored step " in said[1]
    assert "restore" in said[1].partition("(restored")[2].splitlines()[0]
    found = {path.name for path in (corpus[0] / "profiled" / "profile").iterdir()}
    assert found == {"rank-0-steps-2-3.trace.json.gz", "rank-0-steps-2-3.memory.json.gz"}
    for entry in read_trace(corpus[0] / "profiled" / "trace.jsonl"):
        assert sum(entry["phases_ms"].values()) == pytest.approx(1e3 * entry["seconds"], abs=0.1)


@pytest.mark.root
def test_a_run_and_its_resume_end_well_on_a_full_log_disk(corpus: Any, shm_dir: Any) -> None:
    mount = corpus[0] / "tiny-disk"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(mount)], check=False).returncode:
        pytest.skip("cannot mount here")
    try:
        (mount / "filler").write_bytes(bytes(4096 * 2))
        words = command(corpus, "disk", log={"folder": str(mount / "log"), "every": 1, "tensorboard": True})
        outputs = []
        for steps in (3, 6):
            done = subprocess.run([*words, "--train.steps", str(steps)], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            outputs.append(done.stderr)
        assert "cannot be written (No space left on device)" in outputs[1]
        assert "step 6/6" in outputs[1]
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_samples_are_logged_kept_and_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    samples = {"every": 1, "prompts": ["The "]}
    config = run_config(tmp_path, samples=samples, log={"folder": str(tmp_path / "log"), "tensorboard": True})
    caplog.set_level("INFO")
    for after in (0, 1):  # a resume from step 1: the sample of step 2 is taken back
        reporter = Reporter(config, world=1, after=after)
        for step in (after + 1, after + 2):
            reporter.samples(step, [Sample(prompt="The ", text=f"end\x1b[31m\nof {step}")])
        reporter.close()
    lines = [json.loads(text) for text in (tmp_path / "log" / "samples.jsonl").read_text().splitlines()]
    assert [(one["step"], one["samples"][0]["text"][-4:]) for one in lines] == [(1, "of 1"), (2, "of 2"), (3, "of 3")]
    assert r"step 1, sample: The |end\x1b[31m\nof 1" in caplog.text
    shown = accumulator.EventAccumulator(str(tmp_path / "log" / "tensorboard"))
    shown.Reload()
    (tag,) = shown.Tags()["tensors"]
    texts = [event.tensor_proto.string_val[0].decode() for event in shown.Tensors(tag)]
    assert tag.startswith("sample/The")
    assert {text.split()[-1] for text in texts} == {"1", "2", "3"}
