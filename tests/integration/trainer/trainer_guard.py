"""Bad steps in a whole run: skipped on all ranks alike, or rolled back from memory without the samples of the spike."""

from __future__ import annotations

import json
import math
import os
from typing import Any

import pytest
import torch
from support.dlrun import run_dlrun
from support.ranks import run_ranks, values, wait_for
from support.training import run_config, write_corpus

import flashckpt.session.checkpointer  # noqa: F401 -- imported before the fork, so that ranks start in 0.2 s
from flashckpt.checkpoint.catalog import list_checkpoints
from flashckpt.errors import DivergedError
from flashckpt.shm.job_directory import memory_root
from flashckpt.storage.factory import open_store
from flashckpt.trainer.config import from_values, to_toml, to_values
from flashckpt.trainer.parallel.distributed import process_group
from flashckpt.trainer.train.anomaly import Guard
from flashckpt.trainer.train.loop import Trainer, prepare
from flashckpt.trainer.train.metrics import read_trace

STEPS = 9


def config_of(text: Any, name: str, **sections: Any) -> dict[str, Any]:
    folder, source = text
    return to_values(
        run_config(
            folder,
            parallel={"pp": 2},
            model={"layers": 2, "dropout": 0.1},
            train={"steps": STEPS, "global_batch": 8, "micro_batch": 2},
            data={"source": source},
            log={"folder": str(folder / name)},
            **sections,
        )
    )


def run_judged(_rank: int, config_values: Any, spike_at: int, nan_at: int, bad: tuple[int, int]) -> Any:
    """Run to the end with a guard that sees a spike at the first visit of one step, and a NaN loss at another.

    Behind the second element of `bad` a parameter of the last rank becomes NaN, on so many visits as the first says.
    """
    config = from_values(config_values)
    layout = prepare(config, int(os.environ["WORLD_SIZE"]))
    with process_group(config) as device:
        trainer = Trainer(config, layout, device)
        visits: list[int] = []
        plain = Guard.admit

        def admit(self: Guard, loss: float, norm: float, *, step: int) -> bool:
            visits.append(step)
            return plain(self, math.nan if step == nan_at else loss, norm, step=step)

        commit, parameter = trainer._commit, next(trainer.parallel.bare_parts()[0].parameters())

        def poisoned(step: int) -> float:
            if step == bad[1] and visits.count(step) <= bad[0] and _rank == 1:
                with torch.no_grad():
                    parameter.view(-1)[0] = math.nan
            return commit(step)

        trainer._commit = poisoned  # type: ignore[method-assign]  # behind the optimizer, before the snapshot
        trainer.guard.admit = admit.__get__(trainer.guard)  # type: ignore[method-assign]  # what the loop asks
        trainer.guard.is_spike = lambda loss: visits[-1] == spike_at and visits.count(spike_at) == 1  # type: ignore[method-assign]
        code = trainer.run()
        return {"code": code, "visits": visits, "spent": trainer.guard.spent, "skipped": trainer.guard.skipped}


@pytest.fixture(scope="module")
def text(tmp_path_factory: Any) -> Any:
    folder = tmp_path_factory.mktemp("guard")
    return folder, write_corpus(folder / "text")


def run(
    text: Any, name: str, spike_at: int = -1, nan_at: int = -1, bad: tuple[int, int] = (0, 0), **sections: Any
) -> tuple[Any, Any]:
    ranks = values(run_ranks(run_judged, 2, config_of(text, name, **sections), spike_at, nan_at, bad, timeout_s=100))
    assert ranks[0] == ranks[1]  # the ranks decide alike
    return ranks[0], read_trace(text[0] / name / "trace.jsonl")


def run_clipped(_rank: int, config_values: Any) -> Any:
    """Return the gradient norm before and after both kinds of clipping."""
    config = from_values(config_values)
    layout = prepare(config, int(os.environ["WORLD_SIZE"]))
    with process_group(config) as device:
        trainer = Trainer(config, layout, device)
        trainer.initialise()
        totals = trainer.train_step.backward(trainer.data.next())
        trainer._apply(totals, rate=0.0)
        return {"before": totals.norm, "after": trainer.train_step.norm()}


@pytest.mark.parametrize(("by_value", "after"), [(1e-3, 2e-3), (0.0, 2e-3), (1e-9, None)])
def test_the_norm_is_clipped_of_what_clipping_by_value_left(text: Any, by_value: float, after: float | None) -> None:
    optim = {"clip_value": by_value, "clip_norm": 2e-3}
    ranks = values(run_ranks(run_clipped, 2, config_of(text, f"clip{by_value}", optim=optim)))
    assert ranks[0] == ranks[1]
    assert ranks[0]["before"] > 0.1
    if after is not None:
        assert ranks[0]["after"] == pytest.approx(after, rel=1e-2)
    else:
        assert 0 < ranks[0]["after"] < 1e-5, "small enough: left as it is"


@pytest.fixture(scope="module")
def plain(text: Any) -> Any:
    return run(text, "plain")[1]


def test_a_spike_rolls_back_to_memory_and_its_samples_are_left_out(text: Any, plain: Any) -> None:
    checkpoint = {"root": str(text[0] / "root"), "job": "test-spike", "snapshot_every": 2}
    told, trace = run(text, "spike", spike_at=6, guard={"on_spike": "rollback"}, checkpoint=checkpoint)
    assert told == {"code": 0, "visits": [1, 2, 3, 4, 5, 6, 5, 6, 7, 8, 9], "spent": 1, "skipped": 0}
    assert [line["step"] for line in trace] == list(range(1, STEPS + 1))
    assert [line["loss"] for line in trace[:4]] == [line["loss"] for line in plain[:4]]
    # step 4 was the snapshot, step 6 the spike: what these trained is left out, the stream goes on behind it
    assert [line["samples"] for line in trace[4:7]] == [line["samples"] for line in plain[6:9]]
    (spike,) = (json.loads(line) for line in (text[0] / "spike" / "spikes.jsonl").read_text().splitlines())
    assert (spike["step"], spike["action"], len(spike["samples"])) == (6, "rollback", 8)
    wait_for(lambda: not (memory_root() / "test-spike").exists(), what="the job's memory to be given back")


@pytest.mark.parametrize("times", [1, 2])
def test_a_state_that_becomes_bad_is_rolled_back_with_the_same_samples_and_the_second_time_without_them(
    times: int, text: Any, plain: Any
) -> None:
    """Whatever `on_spike` says: no later step mends NaN in a weight. The snapshot that has it is passed over."""
    name = f"bad{times}"
    checkpoint = {"root": str(text[0] / f"root-{name}"), "job": f"test-{name}", "snapshot_every": 2}
    told, trace = run(text, name, bad=(times, 6), checkpoint=checkpoint)
    assert told == {"code": 0, "visits": [1, 2, 3, 4, 5, 6, *[5, 6] * times, 7, 8, 9], "spent": times, "skipped": 0}
    left = 3 if times == 2 else 0  # steps 5 to 7
    assert [line["samples"] for line in trace[4 : 9 - left]] == [line["samples"] for line in plain[4 + left : 9]]
    if not left:
        assert [line["loss"] for line in trace] == [line["loss"] for line in plain]


def test_a_skipped_spike_changes_no_parameter_but_the_data_goes_on(text: Any, plain: Any) -> None:
    _, trace = run(text, "skip", spike_at=3, guard={"on_spike": "skip"})
    assert [line["skipped"] for line in trace] == [line["step"] == 3 for line in trace]
    assert [line["samples"] for line in trace] == [line["samples"] for line in plain]
    assert [line["loss"] for line in trace[:3]] == [line["loss"] for line in plain[:3]]
    assert trace[3]["loss"] != plain[3]["loss"]


def test_a_warned_spike_changes_nothing(text: Any, plain: Any) -> None:
    _, trace = run(text, "warn", spike_at=3)
    assert [line["loss"] for line in trace] == [line["loss"] for line in plain]
    assert len((text[0] / "warn" / "spikes.jsonl").read_text().splitlines()) == 1


def test_a_loss_that_is_not_a_number_is_skipped_on_all_ranks(text: Any) -> None:
    told, trace = run(text, "nan", nan_at=4)
    assert told["skipped"] == 1
    assert [line["step"] for line in trace if line["skipped"]] == [4]


def run_spiking(_rank: int, config_values: Any, spikes: range) -> Any:
    """Return the code of a run whose guard sees a spike at some steps."""
    config = from_values(config_values)
    layout = prepare(config, int(os.environ["WORLD_SIZE"]))
    with process_group(config) as device:
        trainer = Trainer(config, layout, device)
        trainer.guard.is_spike = lambda loss: trainer.done + 1 in spikes  # type: ignore[method-assign]  # what the loop asks
        try:
            return trainer.run()
        except DivergedError as error:
            return error.exit_code


def test_no_checkpoint_of_skipped_steps_pushes_out_one_of_accepted_steps(text: Any) -> None:
    folder = text[0] / "frozen"
    checkpoint = {"root": str(folder / "root"), "job": "test-frozen", "snapshot_every": 1, "persist_every": 2}
    values_of_run = config_of(text, "frozen", guard={"on_spike": "skip"}, checkpoint={**checkpoint, "keep_last": 1})

    def on_storage() -> list[int]:
        return [info.step for info in list_checkpoints(open_store(values_of_run["checkpoint"]["root"]))]

    for spikes, code, last in ((range(5, 99), 50, 4), (range(5, 99), 50, 4), (range(5, 7), 0, STEPS)):
        assert values(run_ranks(run_spiking, 2, values_of_run, spikes, timeout_s=100)) == [code] * 2
        wait_for(lambda last=last: on_storage() == [last], what=f"step {last} alone on storage")  # type: ignore[misc]
    trace = read_trace(folder / "trace.jsonl")
    assert [line["step"] for line in trace if line["skipped"]] == [5, 6]
    assert len(trace) == STEPS


POISONED = """
import math, sys
from flashckpt.trainer.config import read_config
from flashckpt.trainer.train.loop import Trainer, train
from flashckpt.trainer.train.step import TrainStep

SPIKE, NAN = 7, 9
loss_of, one_step, visits, now = TrainStep._loss, Trainer.one_step, [], [0]

def poisoned(self, logits, targets):
    first = visits.count(now[0]) == 1 and self._parallel.dp_rank == 1
    if now[0] == NAN and first:
        logits = logits * math.nan
    return loss_of(self, logits, targets) * (1e4 if now[0] == SPIKE and first else 1.0)

def counted(self):
    now[0] = self.done + 1
    visits.append(now[0])
    return one_step(self)

TrainStep._loss, Trainer.one_step = poisoned, counted
sys.exit(train(read_config(sys.argv[1])))
"""


@pytest.mark.timeout(400)
def test_2x2x2_under_dlrun_rolls_back_a_norm_spike_and_names_the_ranks_of_a_nan(text: Any) -> None:
    """The second of two data-parallel replicas computes gradients of 10,000 times the size once, and NaN another time."""
    folder = text[0] / "eight"
    folder.mkdir()
    values_of_run = config_of(
        text,
        "eight",
        guard={"on_spike": "rollback", "window": 4, "norm_mads": 50.0, "spike_mads": 1e6},
        checkpoint={"root": str(folder / "root"), "job": "test-eight", "snapshot_every": 2},
    )
    values_of_run["parallel"].update(dp_shard=2, tp=2)
    values_of_run["train"].update(steps=10)
    (folder / "run.toml").write_text(to_toml(from_values(values_of_run)))
    (folder / "poisoned.py").write_text(POISONED)
    code, output = run_dlrun(folder, "--nproc-per-node", 8, folder / "poisoned.py", folder / "run.toml", deadline_s=300)
    assert code == 0, output
    trace = read_trace(folder / "trace.jsonl")
    assert [line["step"] for line in trace] == list(range(1, 11))
    assert [line["step"] for line in trace if line["skipped"]] == [9]
    assert "step 7: rolled back to step 6" in output
    assert "samples of step 7 are left out: 8 of 'sampler'" in output
    assert (
        "step 9: losses are not finite on rank 6, 7, gradients on rank 0, 1, 2, 3, 4, 5, 6, 7, parameters on no rank"
        in output
    )
    (spike,) = (json.loads(line) for line in (folder / "spikes.jsonl").read_text().splitlines())
    assert (spike["step"], spike["action"]) == (7, "rollback")
    assert all(math.isfinite(float.fromhex(line["loss"])) for line in trace if line["step"] != 9)
