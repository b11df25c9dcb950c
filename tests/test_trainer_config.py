"""One TOML file, `--a.b value` on top, everything wrong refused with the nearest name and an exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flashckpt.errors import ConfigError, FlashckptError, LayoutError
from flashckpt.trainer.config import compare, from_values, read_config, refuse_changes, to_toml, to_values
from flashckpt.trainer.layout import MULTI_STAGE, SINGLE_STAGE, resolve_layout, stage_layers

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.toml"))


def test_the_printed_config_is_read_back_to_the_same_run(tmp_path: Any) -> None:
    run = from_values(
        {"parallel": {"layers_per_stage": [1, 3]}, "data": {"source": ['a "b"\\c']}, "log": {"tensorboard": True}}
    )
    (tmp_path / "run.toml").write_text(to_toml(run))
    assert read_config(tmp_path / "run.toml") == run
    assert from_values(to_values(run)) == run


def test_words_on_the_command_line_win_over_the_file(tmp_path: Any) -> None:
    (tmp_path / "run.toml").write_text("[train]\nsteps = 3\nseed = 4\n")
    words = ["--train.steps", "9", "--optim.lr=1", "--parallel.sequence-parallel", "false", "--data.source", "a,b"]
    run = read_config(tmp_path / "run.toml", words)
    assert (run.train.steps, run.train.seed, run.optim.lr) == (9, 4, 1.0)
    assert run.parallel.sequence_parallel is False
    assert run.data.source == ("a", "b")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--train.stepz", "3"], "train.steps (the nearest name)"),
        (["--trein.steps", "3"], "train.steps (the nearest name)"),
        (["--steps", "3"], "train.steps (the nearest name)"),
        (["--train.steps", "many"], "int"),
        (["--train.steps", "0"], "1 or more"),
        (["--train.steps"], "--train.steps VALUE"),
        (["steps"], "--section.key value"),
        (["--optim.schedule", "cosin"], "constant | cosine | linear | wsd"),
        (["--model.dropout", "1.0"], "0.0 up to, not including, 1.0"),
    ],
)
def test_a_wrong_word_is_refused_and_the_right_one_named(words: Any, expected: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(None, words)
    assert caught.value.expected == expected


@pytest.mark.parametrize(
    "text", ["[train]\nsteps = 1.5", "[train]\nsteps = true", "[trein]\nsteps = 1", "train = 3", "[train"]
)
def test_a_wrong_file_is_refused(tmp_path: Any, text: Any) -> None:
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ConfigError):
        read_config(tmp_path / "run.toml")


def test_a_missing_file_is_refused(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(tmp_path / "none.toml")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_is_valid(path: Any) -> None:
    run = read_config(path)
    resolve_layout(run, 8 if run.parallel.pp > 1 else 1)


def test_a_changed_dimension_is_an_error_and_a_changed_rate_a_warning() -> None:
    before = to_values(from_values({}))
    now = from_values({"model": {"dim": 128}, "optim": {"lr": 1.0}, "parallel": {"tp": 2}, "log": {"every": 7}})
    changes = {change.key: change.severity for change in compare(before, now)}
    assert changes == {"model.dim": "error", "optim.lr": "warning", "parallel.tp": "warning", "log.every": "note"}
    with pytest.raises(ConfigError, match=r"model\.dim changed") as caught:
        refuse_changes(compare(before, now))
    assert (caught.value.found, caught.value.expected) == ("model.dim = 128", "model.dim = 64")
    refuse_changes([change for change in compare(before, now) if change.severity != "error"])


@pytest.mark.parametrize(
    ("sections", "world", "named"),
    [
        ({"parallel": {"tp": 3}}, 3, "model.heads"),
        ({"parallel": {"tp": 4}}, 4, "model.kv_heads"),
        ({"parallel": {"tp": 2}, "model": {"ffn": 191}}, 2, "model.ffn"),
        ({"parallel": {"tp": 2}, "model": {"vocab": 257}}, 2, "model.vocab"),
        ({"parallel": {"tp": 2}, "train": {"seq_len": 63}}, 2, "train.seq_len"),
        ({"model": {"dim": 66}}, 1, "model.dim"),
        ({"model": {"kv_heads": 3}}, 1, "model.heads"),
        ({"parallel": {"pp": 2, "tp": 2}}, 6, "the world"),
        ({"parallel": {"pp": 8}}, 8, "fewer layers"),
        ({"parallel": {"pp": 2, "layers_per_stage": [1, 2]}}, 2, "layers_per_stage"),
        ({"train": {"global_batch": 15}}, 2, "train.global_batch"),
        ({"train": {"global_batch": 4, "micro_batch": 4}, "parallel": {"pp": 2}}, 2, "micro-batches"),
        ({"parallel": {"schedule": "1F1C", "pp": 2}}, 2, "1F1C"),
        ({"parallel": {"data_parallel": "ddp", "tp": 2}}, 2, "ddp"),
        ({"parallel": {"activation_checkpoint": "every:0"}}, 1, "activation_checkpoint"),
        ({"parallel": {"pp": 0}}, 1, "parallel.pp"),
        ({"model": {"experts": 3}}, 2, "model.experts"),
        ({"model": {"experts": 4}, "parallel": {"tp": 2}}, 2, "without tensor parallel"),
        ({"model": {"experts": 1}}, 1, "experts_per_token"),
        ({"parallel": {"pp": 2, "schedule": "ZBVZeroBubble", "stages_per_rank": 3}}, 2, "stages_per_rank"),
    ],
)
def test_a_layout_that_does_not_divide_is_refused_before_torch(sections: Any, world: Any, named: Any) -> None:
    with pytest.raises(LayoutError, match=named):
        resolve_layout(from_values(sections), world)


def test_every_schedule_that_torch_knows_by_name_is_known() -> None:
    import inspect
    import re

    from torch.distributed.pipelining.schedules import get_schedule_class

    known = {*SINGLE_STAGE, *MULTI_STAGE}
    source = inspect.getsource(get_schedule_class)
    named = set(re.findall(r'"(\w+)": ', source))
    assert named - {"PipelineScheduleSingle", "PipelineScheduleMulti"} == known


def test_stages_cover_every_layer_once_and_spare_the_ends() -> None:
    assert stage_layers(4, 2) == ((0, 1), (2, 3))
    assert stage_layers(6, 4) == ((0,), (1, 2), (3, 4), (5,))
    assert stage_layers(4, 2, [1, 3]) == ((0,), (1, 2, 3))
    for layers in range(1, 20):
        for stages in range(1, layers + 1):
            assert [n for stage in stage_layers(layers, stages) for n in stage] == list(range(layers))


def test_v_shaped_schedules_give_the_first_rank_the_last_stage() -> None:
    layout = resolve_layout(from_values({"parallel": {"pp": 2, "schedule": "zbvzerobubble"}}), 2)
    assert (layout.stages_of(0), layout.stages_of(1), layout.last_stage_rank()) == ((0, 3), (1, 2), 0)


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--train.stepz", "3"], 10, "train.steps (the nearest name)"),
        (["--parallel.pp", "2"], 11, "does not fill the world"),
    ],
)
def test_the_command_ends_with_one_message_and_the_code_before_torch(words: Any, code: Any, text: Any) -> None:
    script = "import sys; from flashckpt.trainer.__main__ import main; c = main(sys.argv[1:]); assert 'torch' not in sys.modules; sys.exit(c)"
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("exit code")) == (code, 1)
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_the_error_of_many_ranks_is_told_once(tmp_path: Any, monkeypatch: Any, capsys: Any) -> None:
    from flashckpt.trainer.__main__ import main

    monkeypatch.setenv("FLASHCKPT_AGENT_DIR", str(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in (2, 0, 1):
        monkeypatch.setenv("RANK", str(rank))
        assert main(["--parallel.tp", "2"]) == LayoutError.exit_code
    assert capsys.readouterr().err.count("LayoutError") == 1


def test_exit_codes_are_distinct() -> None:
    def family(cls: Any) -> Any:
        return [cls, *(d for c in cls.__subclasses__() for d in family(c))]

    codes = [cls.exit_code for cls in family(FlashckptError) if cls.__module__ == "flashckpt.errors"]
    assert len(codes) == len(set(codes))


def test_dlrun_does_not_restart_what_no_restart_can_mend_and_ends_with_its_code() -> None:
    command = [sys.executable, "-m", "flashckpt.daemon.run", "--nproc-per-node", "2", "--max-restarts", "3"]
    done = subprocess.run(
        [*command, "-m", "flashckpt.trainer", "--parallel.tp", "3"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.count("LayoutError")) == (LayoutError.exit_code, 1)
    assert "does not fill the world" in done.stderr
    assert "restarting" not in done.stderr
    assert "Traceback" not in done.stderr
