"""A dry run: its options, which ranks it builds, its estimates, its text, and what it refuses. Real ranks: trainer_dry_run.py."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT

from flashckpt.errors import ConfigError
from flashckpt.trainer import __main__ as command
from flashckpt.trainer.config import from_values, read_config
from flashckpt.trainer.dry_run.command import kinds_by_rank, rank_kinds, spans
from flashckpt.trainer.dry_run.options import DryRunOptions, take_options
from flashckpt.trainer.parallel.layout import resolve_layout
from flashckpt.trainer.plan.activations import estimate, in_flight

TINY = str(ROOT / "configs" / "tiny.toml")
CUBE = str(ROOT / "configs" / "3d.toml")


def run(capfd: Any, *words: str) -> tuple[int, str, str]:
    code = command.main(list(words))
    out, err = capfd.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--dry-run"], "needs the number of ranks"),
        (["--dry-run", "--world"], "--world has no value"),
        (["--dry-run", "--world", "--json"], "--world has no value"),
        (["--dry-run", "--world", "0"], "not a number of 1 or more"),
        (["--dry-run", "--world=-8"], "not a number of 1 or more"),
        (["--dry-run", "--world", "eight"], "not a number of 1 or more"),
        (["--dry-run", "--world", "1e3"], "not a number of 1 or more"),
        (["--dry-run", "--world", "9" * 30], "not a number of 1 or more"),
        (["--dry-run", "--world", "8", "--ranks-per-node", "0"], "not a number of 1 or more"),
        (["--dry-run", "--world", "8", "--device-memory", "80G"], "not a number of 0 or more"),
        (["--world", "8"], "no effect without --dry-run"),
        (["--json"], "no effect without --dry-run"),
    ],
)
def test_wrong_options_are_one_clear_error(words: list[str], problem: str, capfd: Any) -> None:
    with pytest.raises(ConfigError, match=problem):
        take_options(list(words))
    code, out, err = run(capfd, *words, "--config", TINY)
    assert (code, out) == (10, "")
    assert problem in err
    assert "Traceback" not in err


def test_options_are_taken_out_of_the_words() -> None:
    words = ["--config", "a.toml", "--world", "16", "--dry-run", "--json", "--train.steps", "3", "--node-memory=2"]
    options = take_options(words)
    assert options == DryRunOptions(world=16, ranks_per_node=8, node_memory=2 << 30, json=True)
    assert words == ["--config", "a.toml", "--train.steps", "3"]
    assert take_options(["--train.steps", "3"]) is None
    assert take_options(["--dry-run", "--world", "4"]) == DryRunOptions(world=4, ranks_per_node=4)


def test_what_cannot_be_known_without_torch_is_refused_before_it_is_imported() -> None:
    code = (
        "import sys; from flashckpt.trainer.__main__ import main; "
        f"code = main(['--dry-run', '--world', sys.argv[1], '--config', {CUBE!r}]); "
        "sys.exit(99 if 'torch' in sys.modules else code)"
    )
    for world, expected in (("6", 11), ("x", 10)):
        done = subprocess.run([sys.executable, "-c", code, world], capture_output=True, text=True, check=False)
        assert done.returncode == expected, done.stderr


def test_a_layout_that_does_not_divide_is_one_clear_error(capfd: Any) -> None:
    code, out, err = run(capfd, "--dry-run", "--world", "12", "--config", CUBE)
    assert (code, out) == (11, "")
    assert "the layout does not fill the world" in err
    code, out, err = run(capfd, "--dry-run", "--world", "8", "--config", CUBE, "--model.layers", "1")
    assert (code, out) == (11, "")
    assert "fewer layers than pipeline stages" in err


def test_a_batch_that_does_not_divide_is_described_with_its_padding(capfd: Any) -> None:
    code, out, _ = run(capfd, "--dry-run", "--world", "3", "--config", TINY, "--train.global_batch", "16")
    assert code == 0
    assert "3 ranks: DP 3 x TP 1 x PP 1, 2 micro-batches (2 of 18 rows are padding)" in out


def test_the_table_says_what_a_rank_holds(capfd: Any) -> None:
    code, out, _ = run(capfd, "--dry-run", "--world", "8", "--config", CUBE)
    assert code == 0
    assert "229,952 parameters\n8 ranks: DP 2 x TP 2 x PP 2 (1F1B, 2 stages), 2 micro-batches, bubble 33.3%" in out
    assert "1,024 tokens per step\ncheckpoint: 2.8 MB\nsnapshots: 3 slots on each rank" in out
    rows = [line.split() for line in out.splitlines() if line.startswith("    4")]
    assert [row[:4] for row in rows] == [["4", "0", "0-1", "2"], ["4", "1", "0-1", "2"]]


def test_json_has_the_documented_members(capfd: Any) -> None:
    code, out, _ = run(capfd, "--dry-run", "--world", "2", "--json", "--config", TINY, "--ranks-per-node", "1")
    assert code == 0
    found = json.loads(out)
    page = (ROOT / "docs" / "trainer-dry-run.md").read_text()
    rank = {**found["ranks"][0], **found["ranks"][0]["estimate"]}
    for name in [
        *found,
        *found["layout"],
        *found["model"],
        *found["step"],
        *found["checkpoint"],
        *found["snapshots"],
        *rank,
    ]:
        assert f"`{name}`" in page, name
    assert (found["version"], found["world"], found["snapshots"]["ranks_per_node"]) == (1, 2, 1)
    assert found["snapshots"]["node_bytes"] == rank["snapshot_bytes"]


def test_a_run_without_a_root_keeps_no_snapshots(capfd: Any) -> None:
    code, out, _ = run(capfd, "--dry-run", "--world", "1", "--config", TINY, "--checkpoint.root=")
    assert code == 0
    assert "snapshots: none" in out


def test_data_that_is_not_prepared_is_said_and_no_error(tmp_path: Path, capfd: Any) -> None:
    config = tmp_path / "run.toml"
    config.write_text(f'[data]\nfolder = "{tmp_path}/none"\n[[data.sources]]\nkind = "stdlib"\nurls = ["prose"]\n')
    code, out, _ = run(capfd, "--dry-run", "--world", "1", "--config", str(config))
    assert code == 0
    assert f"data: not prepared (no prepared data in {tmp_path}/none); see data prepare" in out


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--device-memory", "10"], "the run does not fit into the memory of a device"),
        (["--node-memory", "100"], "the snapshots do not fit into the memory of a node"),
    ],
)
def test_a_model_that_does_not_fit_is_one_clear_error(words: list[str], problem: str, capfd: Any) -> None:
    path = str(ROOT / "configs" / "llama3-8b.toml")
    code, out, err = run(capfd, "--dry-run", "--world", "8", "--config", path, *words)
    assert code == 11
    assert problem in err
    assert err.count("exit code") == 1
    assert "8,030,261,248 parameters" in out  # the table is there all the same


def test_a_model_that_fits_is_none(capfd: Any) -> None:
    path = str(ROOT / "configs" / "llama3-8b.toml")
    fits = run(capfd, "--dry-run", "--world", "8", "--config", path, "--device-memory", "80", "--node-memory", "300")
    assert fits[0] == 0


def test_every_rank_is_of_one_kind_and_stages_and_remainders_make_kinds() -> None:
    config = read_config(ROOT / "configs" / "llama3-405b.toml")
    layout = resolve_layout(config, 16384)
    kinds = rank_kinds(config, layout)
    assert {kind.pp_ranks for kind in kinds} == {(0,), tuple(range(1, 15)), (15,)}
    assert {kind.shards for kind in kinds if kind.pp_ranks == (0,)} == {
        tuple(range(127)),
        (127,),
    }  # 16,032 rows over 128
    of_rank = kinds_by_rank(kinds, layout)
    assert len(of_rank) == 16384
    for number, kind in enumerate(kinds):
        assert of_rank.count(number) == kind.count(layout)
        assert of_rank[kind.example(layout)] == number


@pytest.mark.parametrize(
    ("schedule", "wanted"),
    [("1F1B", [4, 3, 2, 1]), ("GPipe", [8] * 4), ("Interleaved1F1B", [11, 9, 7, 5]), ("ZBVZeroBubble", [8] * 4)],
)
def test_forwards_in_flight_are_those_of_the_schedule(schedule: str, wanted: list[int]) -> None:
    values = {"model": {"layers": 8}, "parallel": {"pp": 4, "schedule": schedule}}
    layout = resolve_layout(from_values({**values, "train": {"global_batch": 8}}), 4)
    assert [in_flight(layout, rank) for rank in range(4)] == wanted


def activations(**sections: Any) -> int:
    config = from_values(sections)
    layout = resolve_layout(config, config.parallel.pp * config.parallel.tp)
    return estimate(config, layout, 0, block=0, rest=0, whole=0).activations


def test_activations_follow_the_formula() -> None:
    model = {"dim": 64, "layers": 4, "heads": 4, "kv_heads": 2, "ffn": 192, "vocab": 256}
    train = {"seq_len": 64, "micro_batch": 2}
    logits = 128 * 256 * 8
    layer = 2 * 64 + 64 + 2 * (4 + 2) * 16 + 64 + 4 * 192
    assert activations(model=model, train=train) == 128 * 4 * 4 * layer + logits
    full = activations(model=model, train=train, parallel={"activation_checkpoint": "full"})
    assert full == 128 * 4 * (4 * 64 + layer + 2 * 192)  # more than the logits, which are freed before
    half = activations(model=model, train={**train, "precision": "bfloat16"})
    assert half == 128 * 2 * 4 * layer + 128 * 256 * 10


def test_gradients_are_gathered_where_several_micro_batches_add_up() -> None:
    config = read_config(ROOT / "configs" / "llama3-8b.toml")
    once = estimate(config, resolve_layout(config, 8), 0, block=10, rest=5, whole=100).gathered
    several = replace(config, train=replace(config.train, micro_batch=1))
    twice = estimate(several, resolve_layout(several, 8), 0, block=10, rest=5, whole=100).gathered
    # with the head: what is outside of blocks is no more than an embedding here, whose gradient is scattered last
    assert (once, twice) == (2 * (5 + 20) + 2 * 5, 2 * (5 + 20) + 400)


def test_each_zero_gathers_what_its_number_says() -> None:
    block, head = 1000, 512 * 64
    rest, whole = 2 * head, 2 * head + 4 * block

    def gathered(zero: int, micro_batch: int) -> int:
        parallel = {"zero": zero} if zero else {"zero": 0, "dp_shard": 1, "dp_replicate": 2}
        train = {"micro_batch": micro_batch, "global_batch": 4}
        config = from_values({"model": {"vocab": 512, "dim": 64}, "parallel": parallel, "train": train})
        return estimate(config, resolve_layout(config, 2), 0, block=block, rest=rest, whole=whole).gathered

    blockwise = 4 * (rest + 2 * block)
    for micro_batch, gradients in ((1, (whole, whole, rest, rest)), (2, (rest,) * 4)):
        found = [gathered(zero, micro_batch) for zero in (0, 1, 2, 3)]
        parameters = (4 * whole, 4 * whole, 4 * whole, blockwise)
        assert found == [one + 4 * other for one, other in zip(parameters, gradients, strict=True)]


def test_pieces_of_the_loss_and_activations_in_host_memory_are_taken_off() -> None:
    model = {"dim": 64, "layers": 4, "heads": 4, "kv_heads": 2, "ffn": 192, "vocab": 4096}
    train = {"seq_len": 64, "micro_batch": 2}
    layer = 2 * 64 + 64 + 2 * (4 + 2) * 16 + 64 + 4 * 192
    kept = 128 * 4 * 4 * layer
    pieces = 16 * 4096 * 8 + 2 * 4096 * 64 * 4  # and two gradients of the head
    assert activations(model=model, train=train) == kept + 128 * 4096 * 8
    assert activations(model=model, train={**train, "loss_chunk": 16}) == kept + pieces
    assert activations(model=model, train={**train, "loss_chunk": 1000}) == kept + 128 * 4096 * 8
    moved = {"activation_offload": True}
    assert activations(model=model, train={**train, "loss_chunk": 16}, parallel=moved) == max(128 * 4 * layer, pieces)
    assert activations(model=model, train=train, parallel=moved) == 128 * 4096 * 8


@pytest.mark.parametrize(("precision", "gathered"), [("float32", 0), ("bfloat16", 2 * (5 + 20) + 2 * 5)])
def test_nothing_is_gathered_where_there_is_nothing_to_gather(precision: str, gathered: int) -> None:
    config = from_values({"train": {"precision": precision, "global_batch": 1}})
    assert estimate(config, resolve_layout(config, 1), 0, block=10, rest=5, whole=100).gathered == gathered


def test_spans_of_numbers() -> None:
    assert spans([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
