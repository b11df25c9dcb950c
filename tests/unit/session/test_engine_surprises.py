"""Small surprises of a training script: modes of torch, a cell run again, values that turn odd, errors and where they are shown."""

from __future__ import annotations

import datetime as dt
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.exact import started, state_of, step_once
from support.one_rank import Holder, agent_of_the_test, crash, finished, opened  # noqa: F401 -- one is a fixture
from torch import nn

from flashckpt import Checkpointer, report
from flashckpt.errors import ConfigError, FlashckptError, JobInUseError, UnsupportedStateError


def program() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    return model, torch.optim.AdamW(model.parameters())


def trained(root: Path, steps: int = 2) -> None:
    model, optimizer = program()
    ckpt, _ = started(root, model=model, optimizer=optimizer)
    for step in range(1, steps + 1):
        step_once(model, optimizer, step)
        ckpt.step(step)
    crash(ckpt)


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_a_restore_inside_a_mode_without_gradients_gives_state_that_can_be_trained(
    mode: Any, reads: bool, tmp_path: Path
) -> None:
    trained(tmp_path)
    unbroken, stepping = program()
    for step in (1, 2, 3):
        step_once(unbroken, stepping, step)
    model, optimizer = program()
    with mode():
        ckpt, _ = started(tmp_path, model=model, optimizer=optimizer)
        assert torch.is_inference_mode_enabled() == (mode is torch.inference_mode)
    step_once(model, optimizer, 3)
    assert state_of(model, optimizer) == state_of(unbroken, stepping)
    crash(ckpt)
    if reads:
        with torch.inference_mode():
            made_inside = nn.Linear(8, 4)
            ckpt, _ = started(tmp_path, model=made_inside)
            crash(ckpt)
        assert made_inside.weight.is_inference()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused_by_name(layout: torch.layout, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("rows", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout))
    with pytest.raises(UnsupportedStateError, match=r"model\.rows"):
        started(tmp_path, model=model)
    holder = Holder(rows=torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout))
    with pytest.raises(UnsupportedStateError, match="rows"):
        started(tmp_path, model=nn.Linear(2, 2), holder=holder)


def test_a_cell_that_is_run_again_is_said_to_be_of_this_process_and_closing_the_first_helps(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    first, _ = started(tmp_path, model=model)
    first.step(1)
    with pytest.raises(JobInUseError, match="earlier Checkpointer of this process was not closed") as refused:
        started(tmp_path, model=model)
    assert "close()" in refused.value.remedy
    assert "stop the other run" not in str(refused.value)
    first.close()
    crash(started(tmp_path, model=model)[0])


def test_state_that_turns_odd_in_mid_run_costs_snapshots_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = program()
    stopper, failures = Holder(best=None), list[Exception]()
    ckpt, _ = started(tmp_path, model=model, optimizer=optimizer, stopper=stopper)
    ckpt.on_failure = failures.append
    for step, best in ((1, None), (2, dt.date.min), (3, dt.date.min), (4, 0.5)):
        stopper.state = {"best": best}
        step_once(model, optimizer, step)
        ckpt.step(step)
        finished(ckpt)
    assert [type(error) for error in failures] == [UnsupportedStateError] * 2
    assert "stopper@rank0.best" in str(failures[0])
    assert [ckpt.stats[key] for key in ("snapshots", "discarded")] == [2, 2]
    assert caplog.text.count("no snapshot, and none as long as this is so") == 1
    crash(ckpt)
    stopper.state = {"best": dt.date.max}
    with pytest.raises(UnsupportedStateError, match="stopper@rank0"):  # before anything is trained
        started(tmp_path, model=model, optimizer=optimizer, stopper=stopper)
    stopper.state = {"best": None}
    again, report = started(tmp_path, model=model, optimizer=optimizer, stopper=stopper)
    crash(again)
    assert report is not None
    assert (report.step, stopper.state) == (4, {"best": 0.5})


def test_state_that_is_odd_at_the_first_step_ends_the_run_there(tmp_path: Path) -> None:
    model, optimizer = program()
    stopper = Holder(best=None)
    ckpt, _ = started(tmp_path, model=model, optimizer=optimizer, stopper=stopper)
    stopper.state = {"best": dt.date.min}
    with pytest.raises(UnsupportedStateError, match="stopper"):
        ckpt.step(1)
    crash(ckpt)


def test_a_module_list_is_one_module_where_its_parts_have_the_same_names(tmp_path: Path) -> None:
    alike = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    ckpt, _ = started(tmp_path, model=alike, optimizer=torch.optim.SGD(alike.parameters(), lr=0.1))
    assert set(ckpt._tracked.layout().table.fqns) == {f"model.{k}.{of}" for k in (0, 1) for of in ("weight", "bias")}
    crash(ckpt)
    parts = nn.ModuleList([nn.ModuleDict({"a": nn.Linear(2, 2)}), nn.ModuleDict({"b": nn.Linear(2, 2)})])
    ckpt, _ = started(tmp_path / "parts", model=parts)
    assert "model.a.weight" in ckpt._tracked.layout().table.fqns
    crash(ckpt)


@pytest.mark.parametrize(
    "setting", [{"rng": True}, {"exclude": "base.*"}, {"fenced": ["ema"]}, {"replicated_over": "world"}]
)
def test_a_reader_names_a_setting_that_it_has_not(setting: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"readonly\(\) has no {next(iter(setting))}="):
        Checkpointer.readonly(tmp_path).track(model=nn.Linear(2, 2), **setting)


@pytest.mark.parametrize(
    ("thing", "word"),
    [({"lr": 1}, "configuration"), (3, "configuration"), ("a", "configuration"), (sys.__stdout__, "seek")],
)
def test_what_has_no_state_is_refused_with_a_way_to_keep_it(thing: Any, word: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot track") as refused:
        Checkpointer(tmp_path).track(thing=thing)
    assert word in refused.value.remedy


def test_an_error_that_ends_the_program_is_shown_once_without_frames_of_our_own(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trained(tmp_path)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    report.show_own_errors_plainly()
    report.show_own_errors_plainly()
    larger = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4))
    for shown in ("0", "1"):
        monkeypatch.setenv("FLASHCKPT_TRACEBACK", shown)
        try:
            started(tmp_path, model=larger)
        except FlashckptError as error:
            sys.excepthook(type(error), error, error.__traceback__)
            text = str(error)
        printed = capsys.readouterr().err
        assert printed.count(text) == 1
        assert ("flashckpt/restore/" in printed) == (shown == "1")
        assert "test_engine_surprises.py" in printed
        assert text.splitlines()[0] not in caplog.text, "what is raised is not logged too"
    sys.excepthook(KeyError, KeyError("x"), None)
    assert "KeyError: 'x'" in capsys.readouterr().err


class Fails:
    def state_dict(self) -> dict[str, int]:
        return {"a": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise KeyError("of the program")


def test_what_a_method_of_the_program_raised_is_shown_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, monitor = nn.Linear(4, 4), Fails()
    ckpt = opened(tmp_path, model=model, monitor=monitor)
    ckpt.step(1)
    crash(ckpt)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    report.show_own_errors_plainly()
    try:
        opened(tmp_path, model=model, monitor=monitor)
    except FlashckptError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    printed = capsys.readouterr().err
    assert (
        printed.index("in load_state_dict") < printed.index("KeyError: 'of the program'") < printed.index("'monitor'")
    )
    assert "flashckpt/state/" not in printed


def test_a_forked_child_may_train_its_copy_and_leave_the_context_and_touches_nothing_of_the_run(tmp_path: Path) -> None:
    model, optimizer = program()
    ckpt, _ = started(tmp_path, model=model, optimizer=optimizer)
    step_once(model, optimizer, 1)
    ckpt.step(1)
    kept, directory = state_of(model, optimizer), ckpt._alive().directory
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()

    def child() -> None:
        step_once(model, optimizer, 2)
        try:
            ckpt.step(2)
        except ConfigError as error:
            answers.put(error.problem)
        ckpt.close()
        answers.put("closed")

    process = context.Process(target=child)
    process.start()
    process.join(60)
    process.kill()  # nothing but a child that waits for threads which it has not
    assert process.exitcode == 0
    assert [answers.get(), answers.get()] == [
        "this Checkpointer is that of the process from which this one was forked", "closed"
    ]  # fmt: skip
    assert not directory.request_path("ended").exists()
    crash(ckpt)
    again, fresh = program()
    ckpt, restored = started(tmp_path, model=again, optimizer=fresh)
    assert restored is not None
    assert (restored.step, state_of(again, fresh)) == (1, kept)
    crash(ckpt)
