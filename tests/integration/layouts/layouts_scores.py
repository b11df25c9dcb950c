"""Named sets and probes score in every layout and under every schedule as they do without any of our machinery."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 -- the name everybody reads
from support.evaluation import CHOICE, PAIRS, PROBABILITY, TEXTS, write_evaluation
from support.ranks import run_ranks, values
from support.training import run_config, write_corpus

from flashckpt.trainer.config import RunConfig, from_values, to_values
from flashckpt.trainer.evaluate.scores import Evaluator
from flashckpt.trainer.model.initial import fill
from flashckpt.trainer.model.transformer import Transformer
from flashckpt.trainer.parallel.distributed import process_group
from flashckpt.trainer.parallel.layout import MULTI_STAGE, SINGLE_STAGE
from flashckpt.trainer.scored.sets import prepare_sets
from flashckpt.trainer.train import loop

SEQ_LEN = 48
EXPERTS = {"experts": 4, "ffn": 32}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp2": (2, {}),
    "hsdp2x2": (4, {"dp_replicate": 2}),
    "tp2": (2, {"tp": 2}),
    "tp2, whole sequences": (2, {"tp": 2, "sequence_parallel": False}),
    "tp2, loss parallel": (2, {"tp": 2, "loss_parallel": True}),
    **{schedule: (2, {"pp": 2, "schedule": schedule}) for schedule in (*SINGLE_STAGE, *MULTI_STAGE)},
    "ddp2 x LoopedBFS": (
        4,
        {"dp_replicate": 2, "dp_shard": 1, "pp": 2, "data_parallel": "ddp", "schedule": "LoopedBFS"},
    ),
    "fsdp2 x DualPipeV": (4, {"pp": 2, "schedule": "DualPipeV"}),
    "tp2 x ZBVZeroBubble, loss parallel": (4, {"tp": 2, "pp": 2, "loss_parallel": True, "schedule": "ZBVZeroBubble"}),
    "tp2 x DualPipeV": (4, {"tp": 2, "pp": 2, "schedule": "DualPipeV"}),
    "cp3": (3, {"cp": 3}),
    "cp2 x fsdp2": (4, {"cp": 2}),
    "cp2 x tp2 x ZBVZeroBubble": (8, {"cp": 2, "tp": 2, "pp": 2, "schedule": "ZBVZeroBubble"}),
}
EXPERT_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "experts over 2": (2, {}),
    "experts over 2 x tp2, loss parallel": (4, {"tp": 2, "loss_parallel": True}),
    "experts over 2 x InterleavedZeroBubble": (4, {"pp": 2, "schedule": "InterleavedZeroBubble"}),
    "experts over 2 x ZBVZeroBubble": (4, {"pp": 2, "schedule": "ZBVZeroBubble"}),
    "experts over cp2": (2, {"cp": 2}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Any:
    folder = tmp_path_factory.mktemp("scores")
    write_corpus(folder / "text")
    write_evaluation(folder / "evaluation")
    prepare_sets(run_of(folder, {}))
    return folder


def run_of(folder: Any, parallel: dict[str, Any], model: Any = None, batch: int = 8) -> RunConfig:
    """Return a run whose sets and probes divide by no batch."""
    return run_config(
        folder,
        model=model or {},
        train={"seq_len": SEQ_LEN, "global_batch": batch, "micro_batch": 1 if parallel.get("pp") else 2},
        parallel=parallel,
        data={"source": [f"even={folder}/text/a/*.txt"], "holdout_every": 4},
        eval=write_evaluation(folder / "evaluation"),
    )


def score_rank(_rank: int, config_values: Any) -> Any:
    """Return all results before and after a step."""
    config = from_values(config_values)
    layout = loop.prepare(config, int(os.environ["WORLD_SIZE"]))
    with process_group(config) as device:
        trainer = loop.Trainer(config, layout, device)
        trainer.initialise()
        evaluator = Evaluator(config, trainer.parallel)
        found = [asdict(evaluator.scores())]
        trainer.one_step()
        return [*found, asdict(evaluator.scores())]


def scores_in(folder: Any, world: int, parallel: dict[str, Any], model: Any = None, batch: int = 8) -> Any:
    run = to_values(run_of(folder, parallel, model, batch))
    ranks = values(run_ranks(score_rank, world, run, timeout_s=100))
    assert len({json.dumps(rank) for rank in ranks}) == 1  # to the bit
    return ranks[0]


def check_alike(mine: Any, wanted: Any) -> None:
    for one, other in zip(mine, wanted, strict=True):
        for part in ("held_out", "sets", "probes"):
            assert one[part].keys() == other[part].keys()
            for name, figures in other[part].items():
                assert one[part][name] == pytest.approx(figures, abs=3e-6, nan_ok=True), (part, name)


@pytest.fixture(scope="module")
def alone(folder: Any) -> Any:
    return scores_in(folder, 1, {})


@pytest.fixture(scope="module")
def experts_alone(folder: Any) -> Any:
    return scores_in(folder, 1, {}, EXPERTS)


@pytest.mark.parametrize("name", LAYOUTS)
def test_sets_and_probes_score_alike_in_every_layout(name: str, folder: Any, alone: Any) -> None:
    check_alike(scores_in(folder, *LAYOUTS[name]), alone)


def test_three_replicas_score_alike_though_one_is_left_without_a_row(folder: Any) -> None:
    layout = {"dp_replicate": 3, "dp_shard": 1, "data_parallel": "ddp"}
    check_alike(scores_in(folder, 3, layout, batch=12), scores_in(folder, 1, {}, batch=12))


@pytest.mark.parametrize("name", EXPERT_LAYOUTS)
def test_sets_and_probes_score_alike_with_experts(name: str, folder: Any, experts_alone: Any) -> None:
    check_alike(scores_in(folder, *EXPERT_LAYOUTS[name], EXPERTS), experts_alone)


def likelihoods(model: Transformer, tokens: list[int]) -> Any:
    """Return the log-likelihood of each token but the first, and whether it is the likeliest: one row, no padding, no mask."""
    with torch.no_grad():
        logits = F.log_softmax(model(torch.tensor([tokens[:-1]]))[0].double(), -1)
    targets = torch.tensor(tokens[1:])
    return logits.gather(1, targets[:, None])[:, 0].numpy(), (logits.argmax(-1) == targets).numpy()


@pytest.fixture(scope="module")
def plain_model(folder: Any) -> Transformer:
    config = run_of(folder, {})
    model = Transformer(config.model, SEQ_LEN).eval()
    fill(model, config.model, config.train.seed)
    return model


def test_sets_score_what_a_plain_loop_over_documents_gives(folder: Any, alone: Any, plain_model: Transformer) -> None:
    stream = b"".join(text.encode() + b"\0" for text in TEXTS)
    nats = nbytes = count = 0.0
    text_nats = 0.0
    for first in range(0, len(stream) - 1, SEQ_LEN):  # windows of one stream; the mask of documents is off for bytes
        row = list(stream[first : first + SEQ_LEN + 1])
        costs = -likelihoods(plain_model, row)[0]
        nats, count = nats + costs.sum(), count + len(costs)
        text_nats += sum(cost for cost, target in zip(costs, row[1:], strict=True) if target)
        nbytes += sum(target != 0 for target in row[1:])
    found = alone[0]["sets"]["stories"]
    assert found["tokens"] == count == len(stream) - 1
    assert found["loss"] == pytest.approx(nats / count, abs=2e-6)
    assert found["bits_per_byte"] == pytest.approx(text_nats / math.log(2) / nbytes, abs=2e-6)
    flat = np.fromfile(folder / "evaluation" / "flat.bin", "<u2")
    whole = (len(flat) - 1) // SEQ_LEN
    rows = [flat[i * SEQ_LEN : (i + 1) * SEQ_LEN + 1].tolist() for i in range(whole)]
    costs = np.concatenate([-likelihoods(plain_model, row)[0] for row in rows])
    assert alone[0]["sets"]["flat"]["tokens"] == whole * SEQ_LEN
    assert alone[0]["sets"]["flat"]["loss"] == pytest.approx(costs.mean(), abs=2e-6)
    assert math.isnan(alone[0]["sets"]["flat"]["bits_per_byte"])


def log_likelihood(model: Transformer, prompt: str, continuation: str) -> tuple[float, bool]:
    """Return log P(continuation | prompt) of byte tokens, of the last SEQ_LEN targets, and whether each is the likeliest."""
    before, after = list(prompt.encode()) or [0], list(continuation.encode())
    spaces = len(prompt) - len(prompt.rstrip())
    asked = min(len(after) + spaces, SEQ_LEN)
    found, greedy = likelihoods(model, [*before, *after][-(SEQ_LEN + 1) :])
    return float(found[-asked:].sum()), bool(greedy[-asked:].all())


def test_probes_give_what_their_texts_alone_give(alone: Any, plain_model: Transformer) -> None:
    found = alone[0]["probes"]
    rows = [log_likelihood(plain_model, one["prompt"], one["target"]) for one in PROBABILITY]
    assert found["probability"] == pytest.approx(
        {
            "probability": np.mean([math.exp(value) for value, _ in rows]),
            "log_probability": np.mean([value for value, _ in rows]),
            "rank_1": np.mean([greedy for _, greedy in rows]),
            "questions": 3,
            "cut": 1,
        },
        rel=1e-5,
    )
    sides = [list(one.values())[:2] for one in PAIRS]
    better = [log_likelihood(plain_model, "", good)[0] > log_likelihood(plain_model, "", bad)[0] for good, bad in sides]
    assert found["pairs"] == {"accuracy": np.mean(better), "questions": 3, "cut": 0}
    about = "The following are multiple choice questions (with answers) about elementary mathematics."
    asked = [
        ("Snow is", [" white", " black as coal", " a bird"], 0),
        (
            "Baking: A man bakes. He",
            [" eats a stone. x", " opens the oven.", " is a tree.", " flies."],
            1,
        ),
        ("Question: What falls from clouds?\nAnswer:", [" sand", " rain", " glass"], 1),
        ("Question: Ice is\nAnswer:", [" cold", " hot"], 0),
        (
            f"{about}\n\n1 + 1 =\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer:",
            [" A", " B", " C", " D"],
            1,
        ),
    ]
    assert len(asked) == len(CHOICE)
    right = {"acc": 0, "acc_norm": 0}
    for number, (prompt, endings, answer) in enumerate(asked):
        costs = np.array([log_likelihood(plain_model, prompt, ending)[0] for ending in endings])
        sizes = np.array([len(ending) - (number > 0) for ending in endings])  # the first form has no space of its own
        right["acc"] += int(costs.argmax()) == answer
        right["acc_norm"] += int((costs / sizes).argmax()) == answer
    for name, count in right.items():
        assert found["choice"][name] == count / 5
    assert found["choice"]["acc_bytes"] == found["choice"]["acc_norm"]
    assert found["choice"]["cut"] == 4  # the last question is longer than what the model sees
