"""What the demo says is what the files say: traces compared bit for bit, bytes summed over ranks, a picture drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flashckpt.errors import ConfigError, JobInUseError
from flashckpt.shm.job_directory import JobDirectory, memory_root
from flashckpt.trainer.demo.__main__ import Progress, main, read_plan
from flashckpt.trainer.demo.report import compare_traces, draw, read_restores, recovery_facts, recovery_table
from flashckpt.trainer.demo.run import forget_job


def lines(losses: list[float]) -> list[dict[str, Any]]:
    return [
        {"step": i + 1, "loss": loss.hex(), "norm": (1.0).hex(), "samples": f"s{i}"} for i, loss in enumerate(losses)
    ]


def test_one_bit_in_one_step_is_a_difference() -> None:
    one, other = lines([3.0, 2.0, 1.0]), lines([3.0, 2.0, 1.0])
    assert compare_traces(one, other, 3).identical
    other[1]["loss"] = (2.0 + 2**-51).hex()
    result = compare_traces(one, other, 3)
    assert (result.identical, result.equal) == (False, 2)
    assert result.first.startswith("step 2: loss 0x1.0000000000000p+1 / 0x1.0000000000001p+1")


@pytest.mark.parametrize("key", ["norm", "samples"])
def test_other_gradients_or_samples_are_a_difference(key: str) -> None:
    other = lines([3.0])
    other[0][key] = "other"
    assert compare_traces(lines([3.0]), other, 1).first.startswith(f"step 1: {key}")


def test_a_missing_step_is_a_difference_and_no_steps_are_not_the_same() -> None:
    assert compare_traces(lines([3.0, 2.0]), lines([3.0]), 2).first == "step 2: missing"
    assert not compare_traces([], [], 0).identical


def test_restores_are_summed_over_ranks_and_told_apart_by_launch(tmp_path: Path) -> None:
    records = [
        {"launch": launch, "generation": 2, "rank": rank, "step": step, "bytes": {tier: 10**6}, "seconds": 0.1 * rank}
        for launch, step, tier in (("a", 25, "memory"), ("b", 20, "storage"))
        for rank in range(2)
    ]
    (tmp_path / "restores.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    first, second = read_restores(tmp_path)
    assert (first.step, first.ranks, first.seconds, first.text()) == (25, 2, 0.1, "2.00 MB from memory")
    assert (second.step, second.text()) == (20, "2.00 MB from storage")
    assert recovery_facts({"rank": 5, "cause": "signal 9: why"}, first, 3) == [
        "died       rank 5: signal 9",
        "steps lost 3",
        "restored   step 25 by 2 ranks: 2.00 MB from memory",
    ]
    assert read_restores(tmp_path / "none") == []


def test_the_table_has_every_phase_that_the_ledger_knows() -> None:
    console = Console(record=True, width=100)
    console.print(recovery_table({"detect": 0.01, "restore": 0.5}, 1.25))
    text = console.export_text()
    assert [word in text for word in ("0.010", "0.500", "1.250", "fork the ranks")] == [True, True, True, False]


def test_the_picture_is_drawn_without_a_display(tmp_path: Path) -> None:
    for name, count in (("unbroken", 5), ("crash", 5)):
        (tmp_path / name).mkdir()
        text = "".join(json.dumps(line) + "\n" for line in lines([5.0 - i for i in range(count)]))
        (tmp_path / name / "trace.jsonl").write_text(text)
    draw(tmp_path, tmp_path / "loss.png", [(3, 2, "SIGKILL of rank 5")])
    assert (tmp_path / "loss.png").read_bytes()[:4] == b"\x89PNG"


def test_without_a_terminal_a_line_now_and_then_is_told(capsys: Any) -> None:
    with Progress(Console(force_terminal=False), steps=20, name="run") as progress:
        for count in range(1, 21):
            progress.update(lines([1.0] * count))
    assert capsys.readouterr().out.split() == ["step", "10/20", "loss", "1.0000", "step", "20/20", "loss", "1.0000"]


def test_crashes_outside_the_run_are_refused(capsys: Any) -> None:
    with pytest.raises(ConfigError, match="do not fit"):
        read_plan(["--kill-after", "50"])
    assert main(["--kill-rank", "8"]) == ConfigError.exit_code
    assert "0 to 7" in capsys.readouterr().out


def test_what_an_interrupted_demo_left_in_memory_is_removed_unless_it_still_runs() -> None:
    directory = JobDirectory.open("demo-left")
    lease = directory.hold_live()
    with pytest.raises(JobInUseError, match="another demo is running"):
        forget_job("demo-left")
    lease.close()
    forget_job("demo-left")
    assert not (memory_root() / "demo-left").exists()
    forget_job("demo-left")
