"""Pairs of switches that cannot work are refused before torch is imported; the factor of float16 losses."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest

from flashckpt.errors import ConfigError, LayoutError
from flashckpt.trainer.config import from_values
from flashckpt.trainer.config.changes import compare, recorded_values
from flashckpt.trainer.parallel.groups import refuse_check
from flashckpt.trainer.parallel.layout import expert_dimension, resolve_layout
from flashckpt.trainer.parallel.switches import on_device
from flashckpt.trainer.train.record import FIRST, GROW_AFTER, LossScaler

GROUPS = {"dp_replicate": 2, "dp_shard": 1, "sync_every": 4}
DDP = {"data_parallel": "ddp", "dp_replicate": 2, "dp_shard": 1}


@pytest.mark.parametrize(
    ("sections", "world", "why"),
    [
        ({"parallel": {**DDP, "zero": 3}}, 2, "DDP keeps everything on each rank"),
        ({"parallel": {"zero": 0, "dp_shard": 2}}, 2, "zero = 0 cuts nothing"),
        ({"parallel": {"zero": 2, "pp": 2}}, 4, "torch keeps whole gradients and parameters of a stage"),
        ({"parallel": {"zero": 3, "pp": 2}}, 4, "does not go with a pipeline"),
        ({"parallel": {"zero": 1}}, 1, "nothing to cut over"),
        ({"parallel": {"bucket_mb": 1.0}}, 2, "bucket_mb would have no effect"),
        ({"parallel": {**DDP, "offload": "state"}}, 2, "offload = state does not go with this run"),
        ({"parallel": {"offload": "state"}, "model": {"experts": 2}}, 2, "offload = state does not go with this run"),
        (
            {"parallel": {"offload": "state", "pp": 2}, "model": {"tied_embeddings": True}},
            2,
            "offload = state does not go with this run",
        ),
        ({"parallel": {"activation_offload": True, "activation_checkpoint": "full"}}, 1, "nothing would be moved"),
        ({"parallel": {"activation_offload": True, "activation_checkpoint": "groups:2"}}, 1, "nothing would be moved"),
        ({"parallel": {"activation_offload": True}, "train": {"compile": True}}, 1, "through their own graphs"),
        (
            {"parallel": {"activation_checkpoint": "selective"}, "train": {"compile": True}},
            1,
            "the compiler chooses what is kept",
        ),
        ({"parallel": {"tp": 2}, "train": {"loss_chunk": 8}}, 2, "different columns of the logits"),
        ({"parallel": {"activation_checkpoint": "groups:0"}}, 1, "no such mode"),
        ({"parallel": {"ep": 2}}, 2, "parallel.ep would have no effect"),
        ({"parallel": {"cp_exchange": "ring"}}, 2, "cp_exchange would have no effect"),
        ({"parallel": {"cp": 2, "cp_exchange": "ring"}, "train": {"attention": "flex"}}, 2, "without the sums"),
        ({"parallel": {"ep": 3}, "model": {"experts": 6}}, 4, "dp_shard is not divisible by parallel.ep"),
        (
            {"parallel": {"ep": 4, "cp": 2}, "model": {"experts": 6}},
            12,
            "dp_shard x parallel.cp is not divisible|experts is not",
        ),
        ({"parallel": {"ep": 4}, "model": {"experts": 6}}, 4, "experts is not divisible by parallel.ep"),
        ({"parallel": {"zero": 0, "ep": 2}, "model": {"experts": 2}}, 2, "dp_shard is not divisible by parallel.ep"),
        (
            {"parallel": {"ep": 1}, "model": {"experts": 2, "dim": 40, "heads": 4}},
            3,
            "dim is not divisible by the ranks",
        ),
        (
            {"parallel": {"ep": 1}, "model": {"experts": 2, "dim": 48, "heads": 4, "ffn": 64}},
            3,
            "ffn is not divisible by",
        ),
        (
            {"parallel": {"ep": 1}, "model": {"experts": 2}, "train": {"compile": True}},
            2,
            "experts that are cut further",
        ),
        (
            {"parallel": {"ep": 1, "activation_checkpoint": "selective"}, "model": {"experts": 2}},
            2,
            "operators are counted",
        ),
        ({"parallel": {"cp": 2}, "train": {"seq_len": 18}}, 2, "two chunks for each rank of parallel.cp"),
        ({"parallel": {"cp": 2, "tp": 4}, "train": {"seq_len": 12}}, 8, "seq_len .* is not divisible by"),
        ({"parallel": {"cp": 2}}, 3, "does not fill the world"),
        ({"parallel": {"sync_every": 4}}, 2, "dp_replicate is the number of groups"),
        ({"parallel": {"sync_every": 4, "zero": 0}}, 2, "dp_replicate is the number of groups"),
        ({"parallel": {"outer_rate": 1.0}}, 1, "outer_rate would have no effect"),
        ({"parallel": {"outer_momentum": 0.0}}, 1, "outer_momentum would have no effect"),
        ({"parallel": {**DDP, "sync_every": 4}}, 2, "DDP averages gradients over the groups"),
        ({"parallel": {**GROUPS, "zero": 0, "cp": 2}}, 4, "the ranks of one row would be in several groups"),
        ({"parallel": {**GROUPS, "offload": "state"}}, 2, "on the device"),
        ({"parallel": GROUPS, "model": {"experts": 2}}, 2, "add up what all data-parallel ranks have"),
        ({"parallel": GROUPS, "ema": {"decay": 0.9}}, 2, "another in each group"),
        ({"parallel": GROUPS, "train": {"global_batch": 7}}, 2, "different numbers of samples"),
    ],
)
def test_a_pair_that_cannot_work_is_refused_with_the_reason(sections: Any, world: int, why: str) -> None:
    with pytest.raises(LayoutError, match=why):
        resolve_layout(from_values(sections), world)


def test_values_that_no_switch_has_are_refused() -> None:
    for sections in (
        {"parallel": {"zero": 4}},
        {"parallel": {"cp": 2, "cp_exchange": "tree"}},
        {"parallel": {"offload": "disk"}},
        {"train": {"precision": "float8"}},
    ):
        with pytest.raises(ConfigError, match="no such choice"):
            from_values(sections)


def test_refusals_do_not_import_torch() -> None:
    program = (
        "import sys\n"
        "from flashckpt.trainer.config import from_values\n"
        "from flashckpt.trainer.parallel.layout import resolve_layout\n"
        "try:\n    resolve_layout(from_values({'parallel': {'zero': 2, 'pp': 2}}), 4)\n"
        "except Exception as error:\n    print(type(error).__name__, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["LayoutError", "False"]


def test_a_run_of_groups_is_not_compared_with_one_process() -> None:
    with pytest.raises(LayoutError, match="one process has one group"):
        refuse_check(from_values({"parallel": GROUPS}))


def test_groups_can_be_neither_begun_nor_ended_by_a_resume() -> None:
    groups, plain = from_values({"parallel": GROUPS}), from_values({"parallel": {**GROUPS, "sync_every": 0}})
    more = from_values({"parallel": {**GROUPS, "dp_replicate": 3, "outer_momentum": 0.0, "sync_every": 8}})
    old = recorded_values(plain)
    del old["parallel"]["sync_every"], old["parallel"]["outer_rate"], old["parallel"]["outer_momentum"]
    assert compare(old, plain) == []  # recorded before there were groups

    def errors(before: Any, now: Any) -> set[str]:
        return {change.key for change in compare(before, now) if change.severity == "error"}

    assert errors(old, groups) == errors(recorded_values(plain), groups) == {"parallel.sync_every"}
    assert errors(recorded_values(groups), plain) == {"parallel.sync_every"}
    assert errors(recorded_values(groups), more) == {"parallel.outer_momentum"}
    assert errors(recorded_values(groups), groups) == set()


def test_zero_without_cuts_fills_the_world_with_replicas() -> None:
    layout = resolve_layout(from_values({"parallel": {"zero": 0, "tp": 2}}), 8)
    assert (layout.dp_replicate, layout.dp_shard, layout.tp) == (4, 1, 2)


@pytest.mark.parametrize(
    ("world", "parallel", "degrees"),
    [
        (4, {}, (4, 1)),
        (4, {"ep": 2}, (2, 2)),
        (8, {"ep": 4, "tp": 2}, (4, 1)),
        (8, {"ep": 2, "dp_replicate": 2}, (2, 2)),
        (8, {"ep": 4, "cp": 2, "dp_shard": 4}, (4, 2)),
        (4, {"zero": 0}, (1, 1)),
    ],
)
def test_experts_are_shared_by_ep_ranks_and_cut_over_the_rest(
    world: int, parallel: Any, degrees: tuple[int, int]
) -> None:
    layout = resolve_layout(from_values({"parallel": parallel, "model": {"experts": 4}}), world)
    assert (layout.ep, layout.edp) == degrees
    assert ("each expert on one of" in layout.describe()) == (layout.edp > 1)


def test_whole_experts_are_cut_where_they_divide_and_else_rows_of_each() -> None:
    assert [expert_dimension(8, ranks) for ranks in (2, 4, 8, 16, 3)] == [0, 0, 0, 1, 1]


def test_auto_is_bfloat16_on_a_gpu_and_float32_elsewhere() -> None:
    run = from_values({})
    assert on_device(run, "cuda").train.precision == "bfloat16"
    assert on_device(run, "cpu").train.precision == "float32"
    assert on_device(from_values({"train": {"precision": "float32"}}), "cuda").train.precision == "float32"


DOCUMENTS = {"sources": [{"kind": "text", "urls": ["*.txt"]}]}


@pytest.mark.parametrize(
    ("device", "sections", "wanted"),
    [
        ("cuda", {"data": DOCUMENTS}, "flex"),
        ("cuda", {"model": {"window": 8}}, "flex"),
        ("cuda", {"parallel": {"cp": 2}}, "flex"),
        ("cuda", {}, "sdpa"),  # causal alone: its kernel takes grouped heads
        ("cuda", {"data": DOCUMENTS, "model": {"kv_heads": 8}}, "sdpa"),  # with a mask it takes others
        ("cuda", {"data": {**DOCUMENTS, "document_mask": False}}, "sdpa"),
        ("cuda", {"parallel": {"cp": 2, "cp_exchange": "ring"}}, "sdpa"),
        ("cuda", {"data": DOCUMENTS, "train": {"attention": "sdpa"}}, "sdpa"),
        ("cpu", {"data": DOCUMENTS}, "sdpa"),
        ("xpu", {"data": DOCUMENTS}, "sdpa"),
    ],
)
def test_attention_is_flex_on_a_gpu_where_torchs_own_would_keep_scores(
    device: str, sections: dict[str, Any], wanted: str
) -> None:
    model = {"heads": 8, "kv_heads": 2, **sections.get("model", {})}
    assert on_device(from_values({**sections, "model": model}), device).train.attention == wanted


def test_the_scaler_halves_on_overflow_and_doubles_after_steps_without() -> None:
    scaler = LossScaler(enabled=True)
    assert scaler.overflowed(2.0, math.inf)
    assert scaler.scale == FIRST / 2
    assert not any(scaler.overflowed(2.0, 1.0) for _ in range(GROW_AFTER - 1))
    state = scaler.state_dict()
    resumed = LossScaler(enabled=True)
    resumed.load_state_dict(state)
    for each in (scaler, resumed):  # one step more: both double at once
        assert not each.overflowed(2.0, 1.0)
        assert each.scale == FIRST


def test_tf32_is_refused_on_a_cpu() -> None:
    from flashckpt.trainer.parallel.distributed import process_group

    with (
        pytest.raises(ConfigError, match=r"train\.tf32 needs a GPU"),
        process_group(from_values({"train": {"tf32": True, "device": "cpu"}}), alone=True),
    ):
        pass


def test_what_the_scaler_cannot_help_is_left_to_the_guard() -> None:
    scaler = LossScaler(enabled=True)
    assert not scaler.overflowed(math.nan, math.nan)
    while scaler.scale > 1.0:
        assert scaler.overflowed(2.0, math.nan)
    assert not scaler.overflowed(2.0, math.nan)
    assert not LossScaler(enabled=False).overflowed(2.0, math.inf)
    assert LossScaler(enabled=False).state_dict() == {}
