"""Groups that train apart and are synchronised every few steps: their arithmetic, what they send, and what a kill leaves of it."""

from __future__ import annotations

import os
import shutil
import signal
from typing import Any

import pytest
import torch
from support.dlrun import run_dlrun
from support.ranks import run_ranks, values, wait_for
from support.training import floats, run_config, run_rank, train_rank, write_corpus
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import flashckpt.session.checkpointer  # noqa: F401 -- imported before the fork, so that ranks start in 0.2 s
from flashckpt.shm.job_directory import JobDirectory
from flashckpt.trainer.config import from_values, to_toml, to_values
from flashckpt.trainer.data.mixed import open_data
from flashckpt.trainer.data.training_data import TrainingData
from flashckpt.trainer.demo.report import compare_traces, read_restores
from flashckpt.trainer.demo.run import stop_daemon
from flashckpt.trainer.model.initial import fill, materialise
from flashckpt.trainer.model.operators import per_token_loss
from flashckpt.trainer.parallel.apply import build_stage, local_tensor
from flashckpt.trainer.parallel.distributed import process_group
from flashckpt.trainer.parallel.layout import resolve_layout
from flashckpt.trainer.train import loop
from flashckpt.trainer.train.metrics import read_trace

STEPS, EVERY = 9, 4
KILL_AT, SNAPSHOT = 7, 6  # between the synchronisations after steps 4 and 8
TWO = {"dp_replicate": 2, "dp_shard": 1, "sync_every": EVERY}
FOUR = {"dp_replicate": 2, "dp_shard": 2, "sync_every": EVERY}


@pytest.fixture(scope="module")
def text(tmp_path_factory: Any) -> Any:
    folder = tmp_path_factory.mktemp("groups")
    return folder, write_corpus(folder / "text")


@pytest.fixture(autouse=True)
def _memory(monkeypatch: Any, tmp_path: Any) -> None:
    monkeypatch.setenv("FLASHCKPT_SHM_DIR", str(tmp_path / "shm"))


def config_of(text: Any, name: str, parallel: Any, *, saved: bool = False, **more: Any) -> dict[str, Any]:
    folder, source = text
    root = {"root": str(folder / name / "root"), "job": f"test-{name}", "snapshot_every": 2, "persist_every": 3}
    sections: dict[str, dict[str, Any]] = {
        "parallel": parallel,
        "model": {"layers": 2},
        "train": {"steps": STEPS, "global_batch": 8, "micro_batch": 2},
        "optim": {"schedule": "constant", "warmup_steps": 0, "weight_decay": 0.0, "lr": 1e-2},
        "data": {"source": source},
        "log": {"folder": str(folder / name)},
        "checkpoint": root if saved else {},
    }
    for section, content in more.items():
        sections[section] = {**sections.get(section, {}), **content}
    return to_values(run_config(folder, **sections))


# -- arithmetic ----------------------------------------------------------------------------------------------


def flat(tensors: Any) -> Tensor:
    return torch.cat([local_tensor(tensor).detach().flatten() for tensor in tensors])


def weights_after(_rank: int, config_values: Any, steps: int) -> list[list[float]]:
    """Train in this rank; return all of its weights after each step."""
    config = from_values(config_values)
    layout = loop.prepare(config, int(os.environ["WORLD_SIZE"]))
    with process_group(config) as device:
        trainer = loop.Trainer(config, layout, device)
        trainer.initialise()
        found = []
        for _ in range(steps):
            trainer.one_step()
            found.append(flat(trainer.parallel.parameters()).tolist())
        return found


class PlainGroup:
    """One group as a loop without any of the trainer's parallel code: its own model, samples and optimizer."""

    def __init__(self, config: Any, group: int) -> None:
        layout = resolve_layout(config, 2)
        self.model = build_stage(config, resolve_layout(from_values({**to_values(config), "parallel": {}}), 1), 0)
        materialise(self.model, torch.device("cpu"))
        fill(self.model, config.model, config.train.seed)
        self.data = TrainingData(
            open_data(config, "train"),
            dp_rank=group,
            dp_size=2,
            global_batch=config.train.global_batch,
            rows=layout.local_batch,
            seed=config.train.seed,
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.optim.lr, betas=(config.optim.beta1, config.optim.beta2),
                                           eps=config.optim.eps, weight_decay=0.0)  # fmt: skip
        self.limit = config.optim.clip_norm

    def step(self) -> None:
        batch = self.data.next()
        self.optimizer.zero_grad()
        loss = per_token_loss(self.model(batch.tokens), batch.targets[:, :-1]).mean()
        loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.limit)
        self.optimizer.step()
        self.data.sampler.commit()


def test_two_groups_train_as_a_plain_loop_with_an_outer_optimizer_of_torch(text: Any) -> None:
    """Within an interval, at its end, in the next one, and at the last step of the run, which ends one."""
    steps = 7
    config = from_values(config_of(text, "plain", TWO, train={"steps": steps}))
    loop.prepare(config, 2)
    groups = [PlainGroup(config, 0), PlainGroup(config, 1)]
    anchor = [parameter.detach().clone() for parameter in groups[0].model.parameters()]
    outer = torch.optim.SGD(anchor, lr=0.7, momentum=0.9, nesterov=True)
    wanted = []
    for step in range(1, steps + 1):
        for group in groups:
            group.step()
        if step in (EVERY, steps):
            for place, held in enumerate(anchor):
                own = [list(one.model.parameters())[place].detach() for one in groups]
                held.grad = torch.stack([held - one for one in own]).mean(0)
            outer.step()
            for group in groups:
                torch.nn.utils.vector_to_parameters(flat(anchor), group.model.parameters())
        wanted.append([flat(group.model.parameters()) for group in groups])
    found = values(run_ranks(weights_after, 2, to_values(config), steps))
    for step in range(steps):
        for number in range(2):
            assert (torch.tensor(found[number][step]) - wanted[step][number]).abs().max() < 1e-5, (step + 1, number)
        is_synchronised = step + 1 in (EVERY, steps)
        assert (found[0][step] == found[1][step]) == is_synchronised, step + 1


def test_averaging_after_each_step_of_sgd_is_ddp(text: Any) -> None:
    plain = {"name": "sgd", "momentum": 0.0, "clip_norm": 0.0, "lr": 0.1, "nesterov": False}
    averaged = {**TWO, "sync_every": 1, "outer_rate": 1.0, "outer_momentum": 0.0}
    ddp = {"dp_replicate": 2, "dp_shard": 1, "data_parallel": "ddp"}
    found = values(run_ranks(weights_after, 2, config_of(text, "averaged", averaged, optim=plain), 4))
    wanted = values(run_ranks(weights_after, 2, config_of(text, "ddp", ddp, optim=plain), 4))
    first = torch.tensor(wanted[0])
    assert (first[0] - first[-1]).abs().max() > 1e-3, "it trains"
    assert (torch.tensor(found) - torch.tensor(wanted)).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("degrees", "more"),
    [
        ({"tp": 2}, {}),
        ({"pp": 2}, {"model": {"tied_embeddings": True}}),
        ({"cp": 2}, {}),
    ],
)
def test_what_is_cut_within_a_group_changes_nothing(degrees: Any, more: Any, text: Any) -> None:
    short = {"sync_every": 2}
    wanted = values(run_ranks(train_rank, 2, config_of(text, "whole", {**TWO, **short}, **more), 5))[0]
    found = values(run_ranks(train_rank, 4, config_of(text, "cut", {**TWO, **short, **degrees}, **more), 5))[0]
    assert floats(found["losses"]) == pytest.approx(floats(wanted["losses"]), abs=1e-5)
    assert floats(found["norms"]) == pytest.approx(floats(wanted["norms"]), abs=1e-4)


# -- the wire ------------------------------------------------------------------------------------------------


class Sent(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Adds up the elements of all collectives inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("_c10d_functional", "c10d"):
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            self.elements += sum(tensor.numel() for tensor in tensors)
        return out


def sent_by_step(_rank: int, config_values: Any, steps: int) -> dict[str, Any]:
    config = from_values(config_values)
    layout = loop.prepare(config, int(os.environ["WORLD_SIZE"]))
    with process_group(config) as device:
        trainer = loop.Trainer(config, layout, device)
        trainer.initialise()
        sent = []
        for _ in range(steps):
            with Sent() as seen:
                trainer.one_step()
            sent.append(seen.elements)
        return {"sent": sent, "weights": sum(p.numel() for p in trainer.parallel.parameters())}


def test_no_gradient_is_sent_between_two_synchronisations(text: Any) -> None:
    found = values(run_ranks(sent_by_step, 2, config_of(text, "wire", TWO), EVERY + 1))[0]
    totals = found["sent"][0]
    assert 0 < totals < 20, "losses and norms"
    weights = found["weights"]
    assert found["sent"] == [totals] * (EVERY - 1) + [totals + weights, totals]
    every_step = {"dp_replicate": 2, "dp_shard": 1}
    plain = values(run_ranks(sent_by_step, 2, config_of(text, "wire-plain", every_step), 2))[0]
    assert min(plain["sent"]) > weights, "else the count sees nothing"


# -- kills ---------------------------------------------------------------------------------------------------


def train(text: Any, name: str, parallel: Any, kill: Any = None, forget: str = "", **more: Any) -> Any:
    world = parallel["dp_replicate"] * parallel["dp_shard"]
    results = run_ranks(run_rank, world, config_of(text, name, parallel, **more), kill, forget, timeout_s=100)
    if kill is not None:
        assert results[kill["rank"]].signal == signal.SIGKILL
        return None
    assert values(results) == [0] * world
    return read_trace(text[0] / name / "trace.jsonl")


def check_same(unbroken: Any, resumed: Any) -> None:
    result = compare_traces(unbroken, resumed, STEPS)
    assert result.identical, result.first


DROPOUT: dict[str, Any] = {"model": {"layers": 2, "dropout": 0.1}, "eval": {"every": 3, "batches": 1}}


@pytest.fixture(scope="module")
def unbroken(text: Any) -> Any:
    return train(text, "unbroken", FOUR, **DROPOUT)


def forget_memory(job: str) -> None:
    directory = JobDirectory.open(job, create=False)
    wait_for(lambda: not directory.anyone_alive(), what="the ranks to be gone")
    stop_daemon(directory)
    shutil.rmtree(directory.path)


def test_rank_killed_between_synchronisations_and_memory_gone_same_trace(text: Any, unbroken: Any) -> None:
    train(text, "lost", FOUR, {"rank": 2, "step": KILL_AT}, saved=True, **DROPOUT)
    wait_for(lambda: list((text[0] / "lost" / "root").glob("*/MANIFEST")), what="a checkpoint on storage")
    forget_memory("test-lost")
    check_same(unbroken, train(text, "lost", FOUR, saved=True, **DROPOUT))
    (restored,) = read_restores(text[0] / "lost")
    assert (restored.ranks, set(restored.tiers)) == (4, {"storage"})
    assert restored.step in (3, SNAPSHOT), "between synchronisations"


@pytest.mark.parametrize("state", ["model", "outer"])
def test_what_groups_have_in_common_left_out_shows_after_the_next_synchronisation(state: str, text: Any) -> None:
    """`model`: the weights that were synchronised last; `outer`: the momentum."""
    name = f"without-{state}"
    unbroken = train(text, f"{name}-unbroken", TWO)
    train(text, name, TWO, {"rank": 1, "step": KILL_AT}, forget=state, saved=True)
    result = compare_traces(unbroken, train(text, name, TWO, forget=state, saved=True), STEPS)
    assert result.equal == 2 * EVERY


KILLED = """
import os, signal, sys
from flashckpt.trainer.config import read_config
from flashckpt.trainer.train import loop

plain = loop.Trainer._apply

def apply_or_die(self, totals, rate):
    if (os.environ["FLASHCKPT_RESTART"], os.environ["RANK"], self.done + 1) == ("0", "3", int(sys.argv[2])):
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(self, totals, rate)

loop.Trainer._apply = apply_or_die
sys.exit(loop.train(read_config(sys.argv[1])))
"""


def test_dlrun_restarts_a_killed_rank_between_synchronisations_same_trace(text: Any, unbroken: Any) -> None:
    folder = text[0] / "dlrun"
    folder.mkdir()
    run = from_values(config_of(text, "dlrun", FOUR, saved=True, **DROPOUT))
    (folder / "run.toml").write_text(to_toml(run))
    (folder / "killed.py").write_text(KILLED)
    code, output = run_dlrun(folder, "--nproc-per-node", 4, folder / "killed.py", folder / "run.toml", KILL_AT)
    assert code == 0, output
    check_same(unbroken, read_trace(folder / "trace.jsonl"))
    (restored,) = read_restores(folder)
    assert (restored.step, restored.ranks, set(restored.tiers)) == (SNAPSHOT, 4, {"memory"})


def rolled_back(_rank: int, config_values: Any, spike_at: int) -> Any:
    """Run with a guard that sees a spike at the first visit of one step; return the visits, and the weights after each."""
    config = from_values(config_values)
    layout = loop.prepare(config, int(os.environ["WORLD_SIZE"]))
    with process_group(config) as device:
        trainer = loop.Trainer(config, layout, device)
        visits: list[int] = []
        weights: dict[str, list[float]] = {}
        plain = trainer._commit

        def is_spike(_loss: float) -> bool:
            visits.append(trainer.done + 1)
            return visits[-1] == spike_at and visits.count(spike_at) == 1

        def commit(step: int) -> float:
            weights[str(step)] = flat(trainer.parallel.parameters()).tolist()
            return plain(step)

        trainer.guard.is_spike = is_spike  # type: ignore[method-assign, assignment]  # what the loop asks
        trainer._commit = commit  # type: ignore[method-assign]  # called after each step
        return trainer.run(), visits, weights


def test_a_spike_rolls_all_groups_back_and_they_meet_at_the_next_synchronisation(text: Any) -> None:
    unbroken = train(text, "calm", TWO)
    config = config_of(text, "rolled", TWO, saved=True, guard={"on_spike": "rollback"})
    ranks = values(run_ranks(rolled_back, 2, config, KILL_AT, timeout_s=100))
    assert [(code, visits) for code, visits, _ in ranks] == [
        (0, [*range(1, KILL_AT + 1), *range(SNAPSHOT + 1, STEPS + 1)])
    ] * 2
    trace = read_trace(text[0] / "rolled" / "trace.jsonl")
    assert [line["loss"] for line in trace[:SNAPSHOT]] == [line["loss"] for line in unbroken[:SNAPSHOT]]
    left_out = unbroken[SNAPSHOT]["samples"]
    assert [line["samples"] for line in trace[SNAPSHOT:-1]] == [line["samples"] for line in unbroken[SNAPSHOT + 1 :]]
    assert left_out not in [line["samples"] for line in trace]
    (_, _, first), (_, _, second) = ranks
    assert [step for step in range(1, STEPS + 1) if first[str(step)] == second[str(step)]] == [4, 8, STEPS], (
        "the last step synchronises, too"
    )


PHASES: dict[str, Any] = {"phase": {"each": [{"from_step": 6, "seq_len": 32, "global_batch": 4}]}}


def test_rank_killed_between_synchronisations_and_after_a_change_of_phase_same_trace(text: Any) -> None:
    unbroken = train(text, "phases-unbroken", TWO, **PHASES)
    train(text, "phases", TWO, {"rank": 1, "step": KILL_AT}, saved=True, **PHASES)
    check_same(unbroken, train(text, "phases", TWO, saved=True, **PHASES))
    (restored,) = read_restores(text[0] / "phases")
    assert (restored.step, set(restored.tiers)) == (SNAPSHOT, {"memory"})


# -- another number of groups --------------------------------------------------------------------------------


def restored_weights(_rank: int, config_values: Any) -> dict[str, Any]:
    """Restore, and train one step; return what this rank holds before it."""
    config = from_values(config_values)
    layout = loop.prepare(config, int(os.environ["WORLD_SIZE"]))
    with process_group(config) as device:
        trainer = loop.Trainer(config, layout, device)
        trainer._restore()
        assert trainer.outer is not None
        assert trainer.outer.momentum is not None
        found = {
            "weights": flat(trainer.parallel.parameters()).tolist(),
            "anchor": flat(trainer.outer.anchor.held).tolist(),
            "momentum": flat(trainer.outer.momentum.held).tolist(),
            "moments": [flat(s["exp_avg"] for s in o.state.values()).tolist() for o in trainer.optimizers if o.state],
        }
        trainer.one_step()
        trainer.data.close()
        return found


@pytest.mark.parametrize(("groups", "tier"), [(3, "memory"), (2, "storage")])
def test_a_resume_with_other_groups_keeps_those_that_were_there(groups: int, tier: str, text: Any) -> None:
    """Two become three: the third begins where they met last. Three become two: the third is left out."""
    before, name = 5 - groups, f"regrouped-{groups}-{tier}"
    batch: Any = {"train": {"steps": STEPS, "global_batch": 12, "micro_batch": 2}}
    degrees = {"dp_shard": 1, "sync_every": EVERY}
    train(text, name, {"dp_replicate": before, **degrees}, {"rank": 0, "step": KILL_AT}, saved=True, **batch)
    root = text[0] / name / "root"
    wait_for(lambda: list(root.glob("*/MANIFEST")), what="a checkpoint on storage")
    if tier == "storage":
        forget_memory(f"test-{name}")
    again = config_of(text, name, {"dp_replicate": groups, **degrees}, saved=True, **batch)
    found = values(run_ranks(restored_weights, groups, again, timeout_s=100))
    (restored,) = read_restores(text[0] / name)
    assert set(restored.tiers) == {tier}
    step = restored.step
    plain = config_of(text, name, {"dp_replicate": before, **degrees}, **batch)
    wanted = values(run_ranks(weights_after, before, plain, step))
    assert step in (3, SNAPSHOT)
    for group in range(min(groups, before)):
        assert found[group]["weights"] == wanted[group][-1], "bit for bit"
        assert found[group]["moments"]
    assert all(one["anchor"] == found[0]["anchor"] for one in found)
    assert all(one["momentum"] == found[0]["momentum"] for one in found)
    if step > EVERY:
        assert found[0]["anchor"] == wanted[0][EVERY - 1]
        assert any(found[0]["momentum"])
    if groups == 3:
        assert found[2]["weights"] == found[2]["anchor"] != found[0]["weights"]
        assert not any(map(any, found[2]["moments"]))


def test_others_read_the_weights_that_groups_had_in_common_last(text: Any) -> None:
    train(text, "read", TWO, saved=True, train={"steps": EVERY})
    root: Any = {"init": {"from": str(text[0] / "read" / "root")}}
    (read,) = values(run_ranks(first_weights, 1, config_of(text, "from", {}, **root)))
    wanted = values(run_ranks(weights_after, 2, config_of(text, "read-wanted", TWO), EVERY))
    assert read == wanted[0][-1] == wanted[1][-1]


def first_weights(_rank: int, config_values: Any) -> list[float]:
    """Return the weights with which a run begins."""
    config = from_values(config_values)
    with process_group(config) as device:
        trainer = loop.Trainer(config, loop.prepare(config, 1), device)
        trainer.initialise()
        return list(flat(trainer.parallel.parameters()).tolist())
