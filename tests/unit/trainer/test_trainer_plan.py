"""`plan`: its arithmetic against published numbers, against ranks that a dry run builds, against torch's schedules, and measured."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.paths import ROOT
from torch import Tensor, nn
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flashckpt.errors import ConfigError, LayoutError
from flashckpt.trainer import __main__ as command
from flashckpt.trainer.config import RunConfig, from_values, read_config, to_values
from flashckpt.trainer.dry_run.command import describe
from flashckpt.trainer.dry_run.options import DryRunOptions
from flashckpt.trainer.model.loss import per_token_loss
from flashckpt.trainer.model.transformer import Transformer
from flashckpt.trainer.model_config import ModelConfig
from flashckpt.trainer.parallel.layout import resolve_layout
from flashckpt.trainer.plan.activations import estimate
from flashckpt.trainer.plan.command import make_plan
from flashckpt.trainer.plan.failures import chance, gpu_hours
from flashckpt.trainer.plan.flops import flops_per_token, mfu, recomputed_flops_per_token, training_days
from flashckpt.trainer.plan.forecast import memory, step_time
from flashckpt.trainer.plan.gpus import ALIASES, GPUS, find_gpu, gpu_of_device
from flashckpt.trainer.plan.held import held, zero_bytes
from flashckpt.trainer.plan.measure import BlockTimer, blocks_of
from flashckpt.trainer.plan.options import parse
from flashckpt.trainer.plan.recompute import parse_recompute
from flashckpt.trainer.plan.schedules import idle_forwards
from flashckpt.trainer.plan.search import reasons, search, to_paste
from flashckpt.trainer.plan.start import start_line
from flashckpt.trainer.plan.wire import (
    data_elements,
    pipeline_elements,
    sharded_passes,
    tensor_elements,
    traffic,
)

CONFIGS = ROOT / "configs"
EIGHT = str(CONFIGS / "llama3-8b.toml")
H100 = GPUS["h100"]


def run(capfd: Any, *words: str) -> tuple[int, str, str]:
    code = command.main(["plan", *words])
    out, err = capfd.readouterr()
    return code, out, err


# -- published numbers


def test_mixed_precision_takes_112_gb_for_7_g_parameters() -> None:
    found = zero_bytes(7e9, 1, 0)
    assert (found.total, found.parameters, found.gradients, found.optimizer) == (112e9, 14e9, 14e9, 84e9)


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_each_stage_of_zero_cuts_what_was_published(stage: int, gigabytes: float) -> None:
    assert zero_bytes(7.5e9, 64, stage).total / 1e9 == pytest.approx(gigabytes, abs=0.05)
    assert sharded_passes(stage) == (3 if stage == 3 else 2)  # 1.5 times as much on the wire


def test_stages_of_zero_are_known() -> None:
    with pytest.raises(LayoutError, match="no such stage of ZeRO"):
        zero_bytes(1, 1, 4)


def test_175_g_parameters_take_2_8_tb_and_288_years() -> None:
    assert zero_bytes(175e9, 1, 0).total == 2.8e12
    flops = 6 * 175e9
    # one V100 at 28 % of its peak, 300 G tokens
    years = training_days(300e9, 0.28 * GPUS["v100"].flops / flops) / 365.25
    assert years == pytest.approx(288, rel=0.02)


def test_70_g_parameters_take_140_140_and_840_gb() -> None:
    found = zero_bytes(70e9, 1, 0)
    assert (found.parameters, found.gradients, found.optimizer) == (140e9, 140e9, 840e9)


@pytest.mark.parametrize(
    ("parameters", "tokens", "gpus", "tflops", "days"), [(175e9, 300e9, 1024, 140, 34), (1008e9, 450e9, 3072, 163, 84)]
)
def test_days_are_those_published_with_everything_computed_twice(
    parameters: float, tokens: float, gpus: int, tflops: float, days: float
) -> None:
    """arXiv 2104.04473: 8 T P / (n X)."""
    assert training_days(tokens, gpus * tflops * 1e12 / (8 * parameters)) == pytest.approx(days, rel=0.01)


def gpt(dim: int, layers: int, heads: int) -> ModelConfig:
    """A GPT: its two matrices of 4 h in the feed-forward part have as many weights as three of 8 h / 3."""
    return ModelConfig(vocab=51200, dim=dim, layers=layers, heads=heads, kv_heads=heads, ffn=round(8 * dim / 3))


MFU_TABLE = [
    (6144, 48, 64, 8, 4, 1.10, 41.5, 43.7),
    (12288, 96, 96, 64, 64, 13.75, 51.4, 52.8),
    (20480, 105, 128, 280, 280, 37.83, 56.0, 57.0),
    (25600, 128, 160, 512, 512, 71.49, 56.3, 57.0),
]
"""arXiv 2205.05198, tables 3 and 5: width, layers, heads, A100s, batch of 2,048 tokens, seconds, MFU, HFU."""


@pytest.mark.parametrize("row", MFU_TABLE)
def test_mfu_is_that_of_the_published_table(row: tuple[float, ...]) -> None:
    dim, layers, heads, gpus, batch, seconds, published, published_hfu = row
    model = gpt(int(dim), int(layers), int(heads))
    flops = flops_per_token(model, 2048)
    tokens_per_s = batch * 2048 / seconds
    peak = GPUS["a100-80"].flops
    assert 100 * mfu(tokens_per_s, flops, peak, int(gpus)) == pytest.approx(published, abs=0.2)
    # The paper counts attention's products twice where it computes them again in backward.
    attention = 12 * layers * dim * 2048
    assert 100 * mfu(tokens_per_s, flops + attention, peak, int(gpus)) == pytest.approx(published_hfu, abs=0.3)


def test_mfu_of_a_published_llama() -> None:
    """65.2 G parameters at 380 tokens/s on an A100 (LLaMA, arXiv 2302.13971): 49.4 % (arXiv 2311.05610)."""
    model = ModelConfig(vocab=32000, dim=8192, layers=80, heads=64, kv_heads=64, ffn=22016)
    assert 100 * mfu(380, flops_per_token(model, 2048), 312e12, 1) == pytest.approx(49.4, abs=0.5)


def test_computing_all_layers_again_takes_a_third_more_but_for_the_head() -> None:
    """arXiv 2104.04473: 96 B s l h^2 (1 + s / 6h + V / 16lh) per step."""
    model, seq_len = gpt(12288, 96, 96), 2048
    flops = flops_per_token(model, seq_len) + recomputed_flops_per_token(model, seq_len, "full")
    dim, layers = 12288, 96
    wanted = 96 * layers * dim**2 * (1 + seq_len / (6 * dim) + 51200 / (16 * layers * dim))
    assert flops == pytest.approx(wanted, rel=1e-4)
    half = recomputed_flops_per_token(model, seq_len, "every:2")
    assert half == recomputed_flops_per_token(model, seq_len, "full") / 2
    assert recomputed_flops_per_token(model, seq_len, "ffn") == 2 * layers * 3 * dim * model.ffn
    assert recomputed_flops_per_token(model, seq_len, "none") == 0


def test_no_published_run_is_faster_than_the_lower_bound_of_its_step() -> None:
    """arXiv 2205.05198: tp 8, pipelines of 8, 35 and 64 with interleaved stages; see MFU_TABLE."""
    for (dim, layers, heads, gpus, batch, seconds, _, _), pp, stages in zip(
        MFU_TABLE, (1, 8, 35, 64), (0, 3, 3, 2), strict=True
    ):
        values: dict[str, Any] = {"pp": pp, "tp": 8, "dp_shard": 1}
        values |= {"schedule": "Interleaved1F1B", "stages_per_rank": stages} if pp > 1 else {}
        config = from_values({
            "parallel": values, "train": {"seq_len": 2048, "global_batch": batch, "precision": "bfloat16"},
        })  # fmt: skip
        model = replace(gpt(int(dim), int(layers), int(heads)), ffn=round(dim / 3) * 8)  # divides by tp
        config = replace(config, model=model)
        layout = resolve_layout(config, int(gpus))
        needed = memory(config, layout)
        fast = step_time(config, layout, GPUS["a100-80"], needed, ranks_per_node=8, efficiency=1.0)
        assumed = step_time(config, layout, GPUS["a100-80"], needed, ranks_per_node=8)
        assert fast.lower_s < seconds < 1.6 * assumed.upper_s
        assert assumed.estimate_s == pytest.approx(seconds, rel=0.35)


def test_volumes_on_the_wire_are_those_published() -> None:
    assert tensor_elements(2, 3, 5) == 8 * 2 * 3 * 5
    dim = 7
    assert data_elements(2 * 4 * dim * dim) == 16 * dim * dim
    assert pipeline_elements(2, 3, 5) == 2 * 2 * 3 * 5


def test_failures_are_those_published() -> None:
    assert chance(0.01, 128) == pytest.approx(0.7237, abs=1e-4)
    month = gpu_hours("8-percent-month")
    assert month == 9000
    assert chance(24 / month, 1000) == pytest.approx(0.93, abs=0.005)
    assert gpu_hours("llama3") == pytest.approx(50677, abs=1)
    assert gpu_hours("1234h") == 1234
    with pytest.raises(ConfigError, match="neither a preset nor hours"):
        gpu_hours("lama3")


# -- against ranks that are built (and for the shipped configurations in test_trainer_configs.py)


ODD: dict[str, Any] = {"dim": 24, "heads": 4, "kv_heads": 2, "ffn": 40, "layers": 4, "head_dim": 8, "qkv_bias": True}
SPARSE = {**ODD, "qk_norm": True, "experts": 4, "ffn": 16, "shared_ffn": 24, "tied_embeddings": True}


@pytest.mark.parametrize(
    ("world", "parallel", "model"),
    [
        (3, {}, {**ODD, "vocab": 257}),
        (4, {"dp_replicate": 2, "tp": 2, "dp_shard": 1, "sequence_parallel": False}, ODD),
        (8, {"pp": 2, "tp": 2, "schedule": "ZBVZeroBubble"}, SPARSE),
    ],
)
def test_bytes_of_odd_layouts_are_those_that_a_dry_run_counts(world: int, parallel: Any, model: Any) -> None:
    config = from_values({"model": model, "parallel": parallel, "train": {"global_batch": 24}})
    layout = resolve_layout(config, world)
    for row in describe(config, DryRunOptions(world=world))["ranks"]:
        found = held(config, layout, row["pp"][0], row["dp_shard"][-1])
        counted = (row["parameter_bytes"], row["gradient_bytes"], row["optimizer_bytes"])
        assert (found.parameters, found.gradients, found.optimizer) == counted


# -- measured


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Counts the bytes of tensors that operators make, while they exist."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        given = {_key(one) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        for one in tree_leaves(out):
            if isinstance(one, Tensor) and _key(one) not in self._known | given:
                storage = one.untyped_storage()
                self._known.add(_key(one))
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._free, _key(one), storage.nbytes())
        return out

    def _free(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@pytest.mark.parametrize("mode", ["none", "ffn", "every:2", "full", "groups:2", "selective"])
@pytest.mark.parametrize("vocab", [256, 4096])
def test_activations_are_within_a_tenth_of_a_measured_peak(mode: str, vocab: int) -> None:
    sizes = {"dim": 128, "layers": 4, "heads": 4, "kv_heads": 2, "ffn": 384, "vocab": vocab}
    config = from_values({
        "model": sizes, "train": {"seq_len": 128, "micro_batch": 2, "global_batch": 2},
        "parallel": {"activation_checkpoint": mode},
    })  # fmt: skip
    model = Transformer(config.model, 128)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
        parameter.grad = torch.zeros_like(parameter)
    model.set_recompute(parse_recompute(mode))
    tokens, targets = torch.randint(0, vocab, (2, 128)), torch.randint(0, vocab, (2, 128))
    per_token_loss(model(tokens), targets).mean().backward()  # type: ignore[no-untyped-call]  # tables of positions are made
    with LiveBytes() as live:
        per_token_loss(model(tokens), targets).mean().backward()  # type: ignore[no-untyped-call]  # as above
    found = estimate(config, resolve_layout(config, 1), 0, block=0, rest=0, whole=0, is_plain=True).activations
    assert found == pytest.approx(live.peak, rel=0.2 if mode == "selective" else 0.1)


# -- schedules


def finish(orders: list[list[list[Any]]], stages: int) -> int:
    """Run the orders of all ranks and return how long the longest idles; forwards take 1, halves of a backward 1 each."""
    forward: dict[tuple[int, int], int] = {}
    backward: dict[tuple[int, int], int] = {}
    clocks, places, busy = [0] * len(orders), [0] * len(orders), [0] * len(orders)

    def ready(kind: str, stage: int, micro: int) -> int | None:
        if kind == "F":
            return 0 if stage == 0 else forward.get((stage - 1, micro))
        if kind == "W":
            return 0
        return forward.get((stage, micro)) if stage == stages - 1 else backward.get((stage + 1, micro))

    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        before = list(places)
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                now = clocks[rank]
                for kind, stage, micro in order[places[rank]]:
                    at = ready(kind, stage, micro)
                    if at is None:
                        break
                    cost = 2 if kind == "B" else 1
                    now = max(now, at) + cost
                    busy[rank] += cost
                    if kind == "F":
                        forward[stage, micro] = now
                    elif kind in "BI":
                        backward[stage, micro] = now
                else:
                    clocks[rank] = now
                    places[rank] += 1
                    continue
                break
        assert places != before, "the orders wait for each other"
    return max(clocks) - busy[0]


def torch_orders(schedule: str, pp: int, micro_batches: int, per_rank: int) -> list[list[list[Any]]]:
    if schedule == "1F1B":  # torch's drawing of it numbers micro-batches in another way
        orders = []
        for rank in range(pp):
            ahead = min(micro_batches, pp - rank)
            one = [[("F", rank, n)] for n in range(ahead)]
            for n in range(micro_batches):
                one.append([("B", rank, n)])
                one += [[("F", rank, n + ahead)]] if n + ahead < micro_batches else []
            orders.append(one)
        return orders
    kinds = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    found = []
    for actions in get_schedule_ops(schedule, pp, micro_batches, None if per_rank == 1 else per_rank):
        order: list[Any] = []
        for action in actions:
            group = [action] if action is None or not action.sub_actions else list(action.sub_actions)
            steps: list[Any] = [
                (kinds[one.computation_type.name], one.stage_index, one.microbatch_index)
                for one in group
                if one is not None and one.computation_type.name in kinds
            ]
            order += [steps] if steps else []
        found.append(order)
    return found


@pytest.mark.parametrize(
    ("schedule", "per_rank"),
    [
        ("GPipe", 1), ("1F1B", 1), ("LoopedBFS", 2), ("Interleaved1F1B", 2), ("Interleaved1F1B", 3),
        ("InterleavedZeroBubble", 2), ("InterleavedZeroBubble", 3), ("ZBVZeroBubble", 2), ("DualPipeV", 2),
    ],
)  # fmt: skip
def test_a_bubble_is_that_of_the_order_that_torch_runs(schedule: str, per_rank: int) -> None:
    for pp in (2, 4):
        for micro_batches in sorted({1, pp - 1, pp, pp + 1, 4 * pp}):
            needs = {"1F1B": pp, "DualPipeV": 2 * pp}.get(schedule, 1)
            if micro_batches < needs or (
                schedule.startswith("Interleaved") and micro_batches % max(1, micro_batches // pp)
            ):
                continue  # refused, see `resolve_layout`
            found = finish(torch_orders(schedule, pp, micro_batches, per_rank), pp * per_rank)
            planned = idle_forwards(schedule, pp, per_rank, micro_batches)
            if schedule == "InterleavedZeroBubble" and micro_batches < pp:
                assert found <= planned
            else:
                assert found == planned, (pp, micro_batches)


# -- the wire


def moved(config: RunConfig, world: int, *, ranks_per_node: int = 8, pp_rank: int = 0) -> dict[str, Any]:
    layout = resolve_layout(config, world)
    found = traffic(config, layout, pp_rank, held(config, layout, pp_rank), gpu=H100, ranks_per_node=ranks_per_node)
    return {one.dimension: one for one in found}


def wired(**parallel: Any) -> RunConfig:
    return from_values({
        "model": {"layers": 4, "vocab": 256, "dim": 64},
        "parallel": parallel, "train": {"seq_len": 64, "global_batch": 32, "micro_batch": 2},
    })  # fmt: skip


def test_a_rank_sends_what_the_collectives_of_its_dimension_move() -> None:
    tensor = moved(wired(tp=2, dp_shard=1), 2)["tp"]
    stream = 2 * 64 * 64 * 4 // 2  # b s h in bytes, of which a ring of two sends half
    micro_batches = 16
    assert tensor.sent == micro_batches * ((4 * 8 + 2 + 4) * stream + 2 * 64 * 256 * 4 // 2)
    again = moved(wired(tp=2, dp_shard=1, activation_checkpoint="full"), 2)["tp"]
    assert again.sent - tensor.sent == micro_batches * 4 * 4 * stream
    whole = held(wired(), resolve_layout(wired(), 4), 0).whole
    shards = moved(wired(), 4)["dp_shard"]
    assert shards.sent == whole * 3 * (2 * 4 * 4 + 4) // 4  # gathered twice for each of 4 micro-batches, scattered once
    pipeline = moved(wired(pp=2), 2, pp_rank=1)["pp"]
    assert pipeline.sent == 16 * 2 * (2 * 64 * 64) * 4
    replicas = moved(wired(dp_replicate=2, dp_shard=2), 4)
    assert set(replicas) == {"dp_shard", "dp_replicate"}
    assert moved(wired(), 1) == {}


def test_a_dimension_within_a_node_uses_its_links_and_others_the_network() -> None:
    config = read_config(CONFIGS / "llama3-405b.toml")
    found = moved(config, 16384)
    assert {name: one.link for name, one in found.items()} == {"tp": "node", "dp_shard": "network", "pp": "network"}
    assert found["tp"].rate == H100.node_link
    assert found["dp_shard"].rate == found["pp"].rate == H100.network
    flat = moved(from_values({"train": {"global_batch": 16}}), 16)["dp_shard"]
    assert flat.rate == min(H100.node_link, 8 * H100.network)  # all adapters of a node carry one ring
    assert flat.seconds == flat.sent / flat.rate


# -- times, search, and the command


def test_a_step_lies_between_the_longer_of_computing_and_moving_and_their_sum() -> None:
    config = read_config(CONFIGS / "llama3-70b.toml")
    layout = resolve_layout(config, 256)
    time = step_time(config, layout, H100, memory(config, layout), ranks_per_node=8)
    talks = sum(one.seconds for one in time.traffic)
    assert time.lower_s == max(time.compute_s, talks) + time.optimizer_s
    assert time.upper_s == pytest.approx(time.compute_s + talks + time.optimizer_s)
    assert time.lower_s <= time.estimate_s <= time.upper_s


def test_a_search_drops_what_does_not_fit_and_ranks_the_rest() -> None:
    config = read_config(EIGHT)
    found = search(config, 8, H100, ranks_per_node=8)
    times = [one.time.estimate_s for one in found.ranked]
    assert all(one.memory.fits(H100) for one in found.ranked)
    assert times[0] <= 1.02 * min(times)
    assert found.dropped["needs more than the 80 GB of a device"] > 10
    small = search(config, 8, replace(H100, memory=40 * 10**9), ranks_per_node=8)
    assert len(small.ranked) < len(found.ranked)


def test_alike_candidates_are_ranked_by_the_rules_of_the_study() -> None:
    """Micro-batch 1 before more, nothing computed again before recomputation, pipelines before tensor parallelism."""
    found = search(read_config(EIGHT), 8, H100, ranks_per_node=8)
    best = found.ranked[0]
    assert best.config.train.micro_batch == 1
    assert best.config.parallel.activation_checkpoint == "none"
    for one, other in zip(found.ranked, found.ranked[1:], strict=False):
        if math.isclose(one.time.estimate_s, other.time.estimate_s, rel_tol=1e-9):
            assert one.config.train.micro_batch <= other.config.train.micro_batch
    large = read_config(CONFIGS / "llama3-70b.toml")
    large = replace(large, model=replace(large.model, layers=40))  # 35 G parameters
    found = search(large, 32, H100, ranks_per_node=8)
    text = [" ".join(reasons(one)) for one in found.ranked if one.layout.tp > 1]
    assert "sequence parallel pays above 30 G parameters and 2,048 tokens" in text[0]
    short = search(from_values({"train": {"global_batch": 16}}), 8, GPUS["cpu"], ranks_per_node=8)
    assert not any("pays" in " ".join(reasons(one)) for one in short.ranked)


def test_what_is_pasted_is_the_layout_that_was_found(tmp_path: Path) -> None:
    config = read_config(EIGHT)
    for best in search(config, 8, H100, ranks_per_node=8).ranked[:8]:
        path = tmp_path / "paste.toml"
        path.write_text(to_paste(best))
        pasted = to_values(read_config(path))
        whole = to_values(config)
        again = from_values({**whole, "parallel": pasted["parallel"] | {"timeout_s": config.parallel.timeout_s},
                             "train": {**whole["train"], "micro_batch": pasted["train"]["micro_batch"]}})  # fmt: skip
        assert resolve_layout(again, 8) == best.layout
        assert again.parallel.activation_checkpoint == best.config.parallel.activation_checkpoint


def test_a_plan_that_does_not_fit_says_so_after_its_numbers(capfd: Any) -> None:
    code, out, err = run(capfd, "--config", EIGHT, "--gpus", "8", "--gpu", "a100-40")
    assert code == 11
    assert "DOES NOT FIT" in out
    assert "the run does not fit into the memory of a device" in err
    code, out, err = run(capfd, "--config", EIGHT, "--gpus", "1", "--gpu", "h100", "--search")
    assert (code, out) == (11, "")
    assert "no layout fits 1 GPUs" in err


@pytest.mark.parametrize(
    ("words", "code", "problem"),
    [
        (["--gpus", "8", "--gpu", "h1000"], 10, "unknown GPU 'h1000'"),
        (["--gpus", "8"], 10, "--gpu"),
        (["--gpu", "h100"], 10, "--gpus"),
        (["--gpus", "0", "--gpu", "h100"], 10, "not a number from 1"),
        (["--gpus", "8", "--gpu", "h100", "--gpu-memory", "-1"], 10, "not a number above 0"),
        (["--gpus", "8", "--gpu", "h100", "--efficiency", "1.5"], 10, "not a share"),
        (["--gpus", "8", "--gpu", "h100", "--tokens", "many"], 10, "not a number of tokens"),
        (["--gpus", "8", "--gpu", "h100", "--failures", "never"], 10, "neither a preset nor hours"),
        (["--gpus", "8", "--gpu", "h100", "--top", "3"], 10, "no effect without --search"),
        (["--gpus", "8", "--gpu", "h100", "--train.stepz", "3"], 10, "unknown setting"),
        (["--gpus", "7", "--gpu", "h100", "--parallel.tp", "2"], 11, "the layout does not fill the world"),
        (["--gpus", "8", "--gpu", "h100", "--measure"], 10, "cannot time a h100 on this machine"),
    ],
)
def test_wrong_words_are_one_clear_error(words: list[str], code: int, problem: str, capfd: Any) -> None:
    found, out, err = run(capfd, "--config", EIGHT, *words)
    assert (found, out) == (code, "")
    assert problem in err
    assert "Traceback" not in err


def test_figures_of_a_gpu_are_overridden() -> None:
    words = [
        "--gpus",
        "8",
        "--gpu",
        "A100",
        "--gpu-memory",
        "64",
        "--gpu-flops",
        "200",
        "--node-link",
        "10",
        "--network",
        "1",
    ]
    options, rest = parse([*words, "--memory-rate", "5", "--train.steps", "3", "--tokens", "1.5T"])
    assert rest == ["--train.steps", "3"]
    gpu = options.gpu
    assert (gpu.name, gpu.memory, gpu.flops, gpu.memory_rate) == ("a100-80", 64 * 10**9, 200e12, 5e9)
    assert (gpu.node_link, gpu.network, options.tokens) == (10e9, 1e9, 1.5e12)
    assert find_gpu("a100") == GPUS[ALIASES["a100"]]
    assert gpu_of_device("NVIDIA A100-SXM4-40GB") == GPUS["a100-40"]
    assert gpu_of_device("NVIDIA Tomorrow") is None


def test_a_plan_needs_no_torch() -> None:
    code = (
        "import sys; from flashckpt.trainer.__main__ import main; "
        f"code = main(['plan', '--gpus', '8', '--gpu', 'h100', '--search', '--json', '--config', {EIGHT!r}]); "
        "sys.exit(99 if 'torch' in sys.modules else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["search"]["ranked"]


def test_two_blocks_are_timed_and_correct_the_plan() -> None:
    words = ["--gpus", "2", "--gpu", "cpu", "--config", str(CONFIGS / "tiny.toml"), "--measure"]
    options, _ = parse(words)
    _, found = make_plan(read_config(options.config), options)
    assert found["efficiency"]["from"] == "measured on this processor"
    share = found["efficiency"]["share"]
    assert 0 < share <= 1
    again = found["step"]["compute_s"] * share * GPUS["cpu"].flops * 2
    assert again == pytest.approx(found["model"]["hardware_flops_per_token"] * found["step"]["tokens"])
    searched, _ = parse([*words, "--search", "--top", "2"])
    _, ranks = make_plan(read_config(options.config), searched)
    assert len(ranks["search"]["ranked"]) == 2
    assert all(0 < one["efficiency"] <= 1 for one in ranks["search"]["ranked"])


def test_measured_blocks_have_the_sizes_of_one_rank() -> None:
    model = read_config(EIGHT).model
    blocks = blocks_of(model, 8)
    assert (blocks.layers, blocks.heads, blocks.kv_heads, blocks.ffn) == (2, 4, 1, 14336 // 8)
    assert blocks.head_size == model.head_size
    timer = BlockTimer(GPUS["cpu"])
    config = from_values(
        {"train": {"seq_len": 131072}, "model": {"dim": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336}}
    )
    with pytest.raises(ConfigError, match="would take too long"):
        timer._measure(config, 1)


def test_the_line_of_a_start_has_bytes_bubble_and_flops() -> None:
    config = read_config(CONFIGS / "3d.toml")
    line = start_line(config, resolve_layout(config, 8), "")
    assert line.startswith("plan: ")
    assert "parameters 115.2 kB, gradients 115.2 kB, optimizer 230.5 kB" in line
    assert "bubble 33.3%" in line
    assert line.endswith("MFLOPs per token")  # no peak is known of a processor
    eight = read_config(EIGHT)
    known = start_line(replace(eight, log=replace(eight.log, peak_tflops=0.0)), resolve_layout(eight, 8), H100.device)
    assert "57.9 GFLOPs per token, MFU of " in known


def test_json_has_the_documented_members(capfd: Any) -> None:
    code, out, _ = run(capfd, "--config", EIGHT, "--gpus", "8", "--gpu", "h100", "--json", "--search", "--top", "1")
    assert code == 0
    found = json.loads(out)
    page = (ROOT / "docs" / "trainer-plan.md").read_text()
    parts = ("model", "layout", "memory", "efficiency", "failures", "search")
    for name in [*found, *(name for part in parts for name in found[part]), *found["step"], *found["wire"][0]]:
        assert f"`{name}`" in page, name


def test_the_example_of_the_page_is_what_the_command_prints(capfd: Any) -> None:
    page = (ROOT / "docs" / "trainer-plan.md").read_text()
    words = ["--gpus", "256", "--gpu", "h100", "--tokens", "15T"]
    assert f"plan --config configs/llama3-70b.toml {' '.join(words)}" in page
    code, out, _ = run(capfd, "--config", str(CONFIGS / "llama3-70b.toml"), *words)
    assert code == 0
    assert page.split("```\n")[1] == out
