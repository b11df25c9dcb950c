"""One TOML file, `--a.b value` on top, everything wrong refused with the nearest name and an exit code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import warm
from support.agents import pretend_agent
from support.paths import ROOT

from flashckpt.errors import ConfigError, FlashckptError, LayoutError
from flashckpt.trainer import __main__ as command
from flashckpt.trainer.config import from_values, read_config, to_toml, to_values
from flashckpt.trainer.config.changes import compare, recorded_values, refuse_changes
from flashckpt.trainer.model.transformer import Transformer
from flashckpt.trainer.parallel.layout import MULTI_STAGE, SINGLE_STAGE, SPLIT_BACKWARD, resolve_layout, stage_layers
from flashckpt.trainer.train.phases import rate_jump

DDP = {"data_parallel": "ddp", "dp_replicate": 2, "dp_shard": 1}


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
        (["--optim.schedule", "cosin"], "constant | cosine | linear | 1-sqrt | wsd"),
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


def test_the_large_config_is_a_billion_parameters_in_bfloat16_and_compiled() -> None:
    run = read_config(ROOT / "configs" / "1b.toml")
    assert (run.train.precision, run.train.compile) == ("bfloat16", True)
    with torch.device("meta"):
        model = Transformer(run.model, run.train.seq_len)
    assert 0.95e9 < sum(parameter.numel() for parameter in model.parameters()) < 1.05e9


def test_blocks_are_not_compiled_where_their_gradients_would_be_others() -> None:
    run = from_values({"train": {"compile": True}, "parallel": {"pp": 2, "schedule": "ZBVZeroBubble"}})
    with pytest.raises(LayoutError, match=r"train\.compile does not go") as caught:
        resolve_layout(run, 2)
    assert "ZBVZeroBubble, whose backward" in caught.value.found
    for degree in ("pp", "tp", "cp"):
        resolve_layout(from_values({"train": {"compile": True}, "parallel": {degree: 2}}), 2)


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
        ({"parallel": {"tp": 2}, "model": {"ffn": 191}}, 2, "model.ffn"),
        ({"parallel": {"tp": 2}, "model": {"vocab": 257}}, 2, "model.vocab"),
        ({"parallel": {"tp": 2}, "train": {"seq_len": 63}}, 2, "train.seq_len"),
        ({"model": {"dim": 66}}, 1, "model.dim"),
        ({"model": {"kv_heads": 3}}, 1, "model.heads"),
        ({"parallel": {"pp": 2, "tp": 2}}, 6, "the world"),
        ({"parallel": {"pp": 8}}, 8, "fewer layers"),
        ({"parallel": {"pp": 2, "layers_per_stage": [1, 2]}}, 2, "layers_per_stage"),
        ({"parallel": {"schedule": "1F1C", "pp": 2}}, 2, "1F1C"),
        ({"parallel": {"data_parallel": "ddp", "tp": 2}}, 2, "ddp"),
        ({"parallel": {"activation_checkpoint": "every:0"}}, 1, "activation_checkpoint"),
        ({"parallel": {"pp": 0}}, 1, "parallel.pp"),
        ({"model": {"experts": 3}}, 2, "model.experts"),
        ({"model": {"experts": 4}, "parallel": DDP}, 2, "experts go with fsdp"),
        ({"model": {"experts": 4, "shared_ffn": 3}, "parallel": {"tp": 2}}, 2, "model.shared_ffn"),
        ({"model": {"experts": 1}}, 1, "experts_per_token"),
        ({"parallel": {"pp": 2, "schedule": "ZBVZeroBubble", "stages_per_rank": 3}}, 2, "stages_per_rank"),
        *(
            ({"parallel": {**DDP, "pp": 2, "schedule": schedule}}, 4, f"ddp does not go with {schedule}")
            for schedule in SPLIT_BACKWARD
        ),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_before_torch(sections: Any, world: Any, named: Any) -> None:
    with pytest.raises(LayoutError, match=named):
        resolve_layout(from_values(sections), world)


@pytest.mark.parametrize(
    ("sections", "error"),
    [
        ({"parallel": {"schedule": "GPipe"}}, LayoutError),
        ({"parallel": {"stages_per_rank": 2}}, LayoutError),
        ({"parallel": {"loss_parallel": True}}, LayoutError),
        ({"model": {"experts_per_token": 1}}, ConfigError),
        ({"optim": {"schedule": "constant", "min_lr": 1e-5}}, ConfigError),
        ({"optim": {"schedule": "constant", "decay_steps": 5}}, ConfigError),
        ({"guard": {"on_spike": "rollback"}}, ConfigError),
        ({"eval": {"batches": 5}}, ConfigError),
    ],
)
def test_a_setting_that_would_have_no_effect_is_refused(sections: Any, error: Any) -> None:
    with pytest.raises(error, match=r"no effect|nothing to roll back to") as caught:
        from_values(sections)
    assert caught.value.exit_code == error.exit_code
    needs = {"tp": 2, "pp": 2} if error is LayoutError else {}
    more: dict[str, Any] = {
        "parallel": needs,
        "model": {"experts": 0 if error is LayoutError else 4},
        "optim": {"schedule": "cosine"},
        "guard": {"on_spike": "rollback"},
        "checkpoint": {"root": "here"},
        "eval": {"every": 1},
    }
    from_values({section: {**sections.get(section, {}), **more.get(section, {})} for section in {*sections, *more}})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optim.lr", float("nan")),
        ("optim.lr", -1.0),
        ("optim.beta2", 1.0),
        ("optim.clip_norm", -1.0),
        ("parallel.timeout_s", 0.0),
        ("guard.max_interventions", -1),
        ("eval.every", -1),
        ("model.experts", -1),
        ("log.peak_tflops", float("inf")),
    ],
)
def test_a_value_out_of_range_is_refused(key: str, value: Any) -> None:
    section, _, name = key.partition(".")
    with pytest.raises(ConfigError, match=key):
        from_values({section: {name: value}})


def test_storage_options_are_a_table_in_the_file_and_on_the_command_line(tmp_path: Any) -> None:
    text = (
        '[checkpoint]\nroot = "s3://bucket/run"\n[checkpoint.storage_options]\nretries = 2\nendpoint_url = "http://a"\n'
    )
    (tmp_path / "run.toml").write_text(text)
    words = ["--checkpoint.storage_options.endpoint_url", "http://b:9000", "--checkpoint.storage_options.anon=true"]
    run = read_config(tmp_path / "run.toml", words)
    assert run.checkpoint.storage_options == {"retries": 2, "endpoint_url": "http://b:9000", "anon": True}
    (tmp_path / "printed.toml").write_text(to_toml(run))
    assert read_config(tmp_path / "printed.toml") == run
    for wrong in (["--checkpoint.storage_options", "a"], ["--checkpoint.root.a", "b"], ["--trein.a.b", "c"]):
        with pytest.raises(ConfigError):
            read_config(None, wrong)


def test_credentials_are_not_printed(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        '[checkpoint]\nroot = "s3://b/r"\n[checkpoint.storage_options]\nkey = "hush1"\nsecret = "hush2"\nretries = 2\n'
        'endpoint_url = "http://me:hush3@a:9000"\nclient_kwargs = {aws_session_token = "hush4", verify = false}\n'
        'SASL_PASSWORD = "hush5"\n'
    )
    words = [sys.executable, "-m", "flashckpt.trainer", "--config", str(tmp_path / "run.toml"), "--print-config"]
    out = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    assert "hush" not in out
    assert out.count("***") == 5
    for kept in ('root = "s3://b/r"', '"retries" = 2', "@a:9000", '"verify" = false'):
        assert kept in out


def test_storage_options_are_not_recorded_with_the_checkpoints() -> None:
    """They may hold credentials, and they say how the root is reached, not what the run is."""
    run = from_values({"checkpoint": {"root": "s3://b", "storage_options": {"secret": "xyzzy"}}})
    assert "xyzzy" not in str(recorded_values(run))
    assert compare(recorded_values(run), run) == []


def test_a_layout_is_described_with_its_bubble() -> None:
    train = {"global_batch": 16, "micro_batch": 2}
    parallel = {"pp": 2, "tp": 2, "dp_shard": 2}

    def describe(**more: Any) -> str:
        return resolve_layout(from_values({"train": train, "parallel": {**parallel, **more}}), 8).describe()

    assert describe() == "DP 2 x TP 2 x PP 2 (1F1B, 2 stages), 4 micro-batches, bubble 20.0%"
    assert describe(schedule="Interleaved1F1B").endswith("bubble 11.1%")
    assert describe(schedule="ZBVZeroBubble").endswith("bubble 4.0%")
    assert "bubble" not in resolve_layout(from_values({}), 1).describe()


@pytest.mark.parametrize(
    ("changed", "step", "old", "new"),
    [
        ({"train": {"steps": 200}}, 100, "3.000e-04", "1.761e-03"),
        ({"optim": {"decay_steps": 190}}, 100, "3.000e-04", "1.761e-03"),
        ({"optim": {"lr": 6e-3}}, 10, "3.000e-03", "6.000e-03"),
    ],
)
def test_a_schedule_that_jumps_at_the_restore_is_told_with_both_rates(
    changed: Any, step: int, old: str, new: str
) -> None:
    before = to_values(from_values({}))
    text = rate_jump(before, from_values(changed), step)
    assert f"jumps at the restored step {step}: {old} under the recorded schedule" in text
    assert f"{new} under this one" in text
    assert ("set optim.decay_steps = 90" in text) == ("train" in changed)


COSINE, LINEAR, WSD, CONSTANT = ({"schedule": name} for name in ("cosine", "linear", "wsd", "constant"))


@pytest.mark.parametrize(
    ("before", "now", "steps", "at", "old", "new"),
    [
        (COSINE, COSINE, 200, "the restored step 100:", "3.000e-04", "1.761e-03"),
        (LINEAR, LINEAR, 200, "the restored step 100:", "3.000e-04", "1.721e-03"),
        (WSD, WSD, 200, "the restored step 100:", "3.000e-04", "3.000e-03"),
        (COSINE, {**COSINE, "decay_steps": 190}, 100, "the restored step 100:", "3.000e-04", "1.761e-03"),
        ({**COSINE, "decay_steps": 45}, {**COSINE, "decay_steps": 90}, 100, "the restored step 50:", "3.814e-04", "1.884e-03"),
        (CONSTANT, {**CONSTANT, "lr": 1e-3}, 200, "the restored step 100:", "3.000e-03", "1.000e-03"),
        (CONSTANT, COSINE, 200, "the restored step 100:", "3.000e-03", "1.761e-03"),
        (COSINE, CONSTANT, 200, "the restored step 100:", "3.000e-04", "3.000e-03"),
        (COSINE, {**COSINE, "warmup_steps": 50}, 100, "the restored step 20:", "2.919e-03", "1.200e-03"),
        (COSINE, {**COSINE, "min_lr": 1e-3}, 100, "the restored step 100:", "3.000e-04", "1.000e-03"),
        (COSINE, {**COSINE, "decay_steps": 2}, 100, "step 11, the first after the restored one:", "2.999e-03", "1.650e-03"),
        (CONSTANT, {**LINEAR, "decay_steps": 4}, 200, "step 11, the first after the restored one:", "3.000e-03", "2.325e-03"),
    ],
)  # fmt: skip
def test_every_way_in_which_a_rate_jumps_is_told_with_both_numbers(
    before: Any, now: Any, steps: int, at: str, old: str, new: str
) -> None:
    recorded = to_values(from_values({"optim": before}))
    step = 10 if at.startswith("step 11") else int(at.rstrip(":").split()[-1])
    text = rate_jump(recorded, from_values({"optim": now, "train": {"steps": steps}}), step)
    assert f"the learning rate jumps at {at} {old} under the recorded schedule" in text
    assert f"{new} under this one" in text


@pytest.mark.parametrize(
    ("before", "now", "steps", "step"),
    [
        (CONSTANT, CONSTANT, 200, 100),
        (WSD, WSD, 200, 60),  # before the old decay began
        ({**COSINE, "decay_steps": 90}, {**COSINE, "decay_steps": 90}, 200, 100),
        (COSINE, COSINE, 200, 10),  # at the end of the warm-up: the curves part slowly from here on
        (COSINE, {**COSINE, "decay_steps": 1}, 10, 10),  # nothing is trained any more
    ],
)
def test_a_run_whose_rate_goes_on_is_not_warned_of(before: Any, now: Any, steps: int, step: int) -> None:
    recorded = to_values(from_values({"optim": before}))
    assert rate_jump(recorded, from_values({"optim": now, "train": {"steps": steps}}), step) == ""


def test_the_advice_takes_the_jump_away() -> None:
    before = to_values(from_values({}))
    longer = {"train": {"steps": 200}}
    assert rate_jump(before, from_values({**longer, "optim": {"decay_steps": 90}}), 60) == ""
    assert rate_jump(before, from_values({}), 60) == ""
    assert rate_jump(before, from_values(longer), 5) == ""  # in the warm-up both are the same
    assert rate_jump({}, from_values({}), 60) == ""  # a record without these values


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
    assert (layout.stages_of(0), layout.stages_of(1), layout.rank_of_stage(3)) == ((0, 3), (1, 2), 0)


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

    monkeypatch.setenv("FLASHCKPT_AGENT_DIR", pretend_agent(tmp_path))
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


def test_dlrun_does_not_restart_after_a_permanent_error_and_ends_with_its_code(tmp_path: Path) -> None:
    command = ["-m", "flashckpt.daemon.run", "--nproc-per-node", "2", "--max-restarts", "3"]
    done = warm.run([*command, "-m", "flashckpt.trainer", "--parallel.tp", "3"], tmp_path)
    assert (done.returncode, done.stderr.count("LayoutError")) == (LayoutError.exit_code, 1)
    assert "does not fill the world" in done.stderr
    assert "restarting all" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_checkpoint_of_other_rotary_pairs_is_not_gone_on_with() -> None:
    """Its weights would fit, and mean something else."""
    run = from_values({})
    before = recorded_values(run)
    del before["model"]["head_dim"]
    with pytest.raises(ConfigError, match=r"model\.rope_pairs changed since the checkpoint"):
        refuse_changes(compare(before, run))


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ({"rope_scaling": "yarn", "rope_factor": 4.0}, "needs a length to scale from"),
        ({"rope_scaling": "twice"}, "model.rope_scaling has no such choice"),
        ({"rope_factor": 4.0}, "model.rope_factor would have no effect"),
        ({"rope_scaling": "llama3", "rope_context": 64, "rope_beta_fast": 16.0}, "model.rope_beta_fast would have"),
        ({"window_from": 1}, "model.window_from would have no effect"),
        ({"shared_ffn": 16}, "model.shared_ffn would have no effect"),
        ({"family": "gpt2"}, "model.family has no such choice"),
    ],
)
def test_a_model_that_cannot_be_meant_is_refused(model: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        from_values({"model": model})


@pytest.mark.parametrize(
    ("name", "words", "problem"),
    [
        ("hub", ["export", "--tok", "folder", "root", "out"], r"No such option:? '?--tok'?"),
        ("hub", ["import", "folder"], "Missing argument 'ROOT'"),
        ("hub", [], "Missing command"),
        ("generate", ["source", "prompt", "--max", "3"], r"No such option:? '?--max'?"),
        ("plan", ["--gpus", "8"], "Missing option '--gpu'"),
        ("plan", ["--gpus", "0", "--gpu", "h100"], "'0' is not a number from 1"),
    ],
)
def test_a_wrong_command_line_is_one_error_and_no_flag_can_be_shortened(
    name: str, words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([name, *words]) == 10
    out, err = capsys.readouterr()
    assert (out, bool(re.search(problem, err)), err.count("exit code 10")) == ("", True, 1)


@pytest.mark.parametrize("words", [["plan"], ["hub"], ["hub", "export"], ["generate"]])
def test_every_command_explains_itself(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = command.main([*words, "--help"])
    except SystemExit as done:
        code = int(done.code or 0)
    assert (code, capsys.readouterr().out[:6]) == (0, "Usage:")
