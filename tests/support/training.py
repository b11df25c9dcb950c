"""Small training runs for tests: a corpus of three channels, and ranks that train a few steps in a layout."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from flashckpt.trainer.config import RunConfig, from_values


def write_corpus(folder: Path) -> list[str]:
    """Write a little real text and return the `data.source` that names it."""
    import pydoc_data.topics

    topics = sorted(pydoc_data.topics.topics.items())
    for number, (name, text) in enumerate(topics):
        channel = "ab"[number % 2]
        (folder / channel).mkdir(parents=True, exist_ok=True)
        (folder / channel / f"{name.replace('/', '_')}.txt").write_text(text)
    return [f"even={folder}/a/*.txt", f"odd={folder}/b/*.txt"]


def run_config(folder: Path, **sections: dict[str, Any]) -> RunConfig:
    """Return a small run whose data, trace and checkpoints lie in `folder`; sections override it key by key."""
    values: dict[str, dict[str, Any]] = {
        "model": {"dim": 32, "layers": 4, "heads": 4, "kv_heads": 2, "ffn": 64},
        "train": {"steps": 4, "seq_len": 16, "global_batch": 16, "micro_batch": 2, "device": "cpu"},
        "optim": {"warmup_steps": 2},
        "data": {"source": [f"text={folder}/text/*.txt"], "folder": str(folder / "tokens")},
        "log": {"folder": str(folder / "log"), "every": 1000},
    }
    for section, content in sections.items():
        values[section] = {**values.get(section, {}), **content}
    return from_values(values)


def train_rank(rank: int, values: dict[str, Any], steps: int) -> dict[str, Any]:
    """Train `steps` steps in this rank without checkpoints; losses and norms as float.hex()."""
    import os

    from flashckpt.trainer.parallel.distributed import process_group
    from flashckpt.trainer.train.loop import Trainer, prepare

    config = from_values(values)
    layout = prepare(config, int(os.environ["WORLD_SIZE"]))
    with process_group(config) as device:
        trainer = Trainer(config, layout, device)
        trainer.initialise()
        records = [trainer.one_step() for _ in range(steps)]
        return {
            "losses": [record.loss.hex() for record in records],
            "norms": [record.norm.hex() for record in records],
            "samples": [record.samples for record in records],
            "channels": [record.channels for record in records],
            "reporter": trainer.parallel.reporter,
            "parameters": parameter_digest(trainer),
            "ends": ends_digests(trainer),
        }


def parameter_digest(trainer: Any) -> str:
    """Return a digest of this rank's local parameters and optimizer state."""
    tensors = []
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                tensors += [parameter, *(state[key] for key in sorted(state))]
    return digest_of(tensors)


def ends_digests(trainer: Any) -> dict[str, str]:
    """Return digests of what this rank holds of embedding and head, and of their moments: name and place -> digest."""
    from flashckpt.trainer.parallel.tied import EMBEDDING, HEAD

    place = f"dp {trainer.parallel.dp_rank}, tp {trainer.parallel.coordinate('tp')}"
    found = {}
    states = {parameter: state for optimizer in trainer.optimizers for parameter, state in optimizer.state.items()}
    for part in trainer.parallel.bare_parts():
        for name, parameter in part.named_parameters():
            if name in (EMBEDDING, HEAD):
                state = states[parameter]
                found[f"{name} {place}"] = digest_of([parameter, *(state[key] for key in sorted(state))])
    return found


def digest_of(tensors: list[Any]) -> str:
    """Return a digest of the local parts of tensors."""
    import torch

    from flashckpt.trainer.parallel.apply import local_tensor

    sha = hashlib.sha256()
    for value in tensors:
        sha.update(local_tensor(value.detach()).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:16]


def floats(values: list[str]) -> list[float]:
    """Return the numbers of float.hex() strings."""
    return [float.fromhex(value) for value in values]


def leave_out(name: str) -> None:
    """Make this process's Checkpointer forget one kind of state: a resume must then show it."""
    from flashckpt.session.checkpointer import Checkpointer

    track, step, forgotten = Checkpointer.track, Checkpointer.step, {}

    def track_less(self: Any, **things: Any) -> None:
        forgotten[name] = things[name]
        track(self, **{**things, name: False if name == "rng" else None})

    def step_and_commit(self: Any, number: int, samples: int | None = None, **options: Any) -> None:
        if name == "sampler":  # the position still moves, only it is not recorded
            forgotten[name].commit()
        step(self, number, samples, **options)

    Checkpointer.track, Checkpointer.step = track_less, step_and_commit  # type: ignore[method-assign, assignment]  # on purpose


def run_rank(rank: int, values: dict[str, Any], kill: dict[str, int] | None = None, forget: str = "") -> int:
    """Run the whole loop in this rank, with checkpoints; `kill`: {"rank", "step"} dies by SIGKILL inside that step.

    Death comes between backward and the optimizer step: the middle of a step. `forget` names a kind of state that
    is not tracked.
    """
    import os
    import signal

    from flashckpt.trainer.parallel.distributed import process_group
    from flashckpt.trainer.train.loop import Trainer, prepare

    if forget:
        leave_out(forget)
    config = from_values(values)
    layout = prepare(config, int(os.environ["WORLD_SIZE"]))
    with process_group(config) as device:
        trainer = Trainer(config, layout, device)
        apply = trainer._apply

        def apply_or_die(totals: Any, rate: float) -> bool:
            if kill is not None and (kill["rank"], kill["step"]) == (rank, trainer.done + 1):
                os.kill(os.getpid(), signal.SIGKILL)
            return apply(totals, rate)

        trainer._apply = apply_or_die  # type: ignore[method-assign]  # the place where a test kills
        return trainer.run()
