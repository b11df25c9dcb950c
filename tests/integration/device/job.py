"""The training program of `device_jobs.py`: exact, on the emulated device, told where to die and what its device does to it.

python -m integration.device.job FOLDER --nets adamw/mlp/float32,sgd/mlp/bfloat16 --kind ddp --die copy
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support import emulated_device
from support.deaths import die_in_a_copy, kill
from support.emulated_device import collectives
from torch import nn
from torch.optim import swa_utils

from flashckpt import Checkpointer, accelerator, faults
from flashckpt.snapshot.device import DeviceCopier
from flashckpt.state.placement import local_of
from integration.device.nets import CLASSES, DTYPES, MODULES, OPTIMIZERS, ROWS, VOCABULARY, WORDS

STEPS, DIES_AT, FAILS_AT = 8, 5, 3
LONGEST_US = 400
"""Of a pause of the emulated streams."""


class Trained:
    """One net with its optimizer, scheduler, loss scale, and where there is one process an average of it."""

    def __init__(self, words: str, options: argparse.Namespace, at: torch.device) -> None:
        optimizer, module, dtype = words.split("/")
        self.name = words.replace("/", "_").replace("-", "_")
        self.model: nn.Module = MODULES[module]().to(at)
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(DTYPES[dtype])
        if options.kind == "ddp":
            self.model = nn.parallel.DistributedDataParallel(self.model)
        elif options.kind == "fsdp":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.model, mesh=init_device_mesh("emu", (dist.get_world_size(),), mesh_dim_names=("dp",)))
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.average = swa_utils.AveragedModel(self.model) if options.kind == "plain" else None

    def step(self, tokens: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Queue a step up to its gradients; return the loss."""
        self.optimizer.zero_grad()
        loss: torch.Tensor = nn.functional.cross_entropy(self.model(tokens).float(), wanted)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        return loss

    def update(self) -> None:
        self.optimizer.step()
        self.schedule.step()
        if self.average is not None:
            self.average.update_parameters(self.model)

    def tracked(self) -> dict[str, Any]:
        things = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule, "average": self.average}
        return {f"{name}_{self.name}": thing for name, thing in things.items()}

    def digest(self) -> str:
        """Of every local byte of parameters, buffers and optimizer state."""
        found = hashlib.sha256()
        states = [state[key] for state in self.optimizer.state.values() for key in sorted(state)]
        averages = [] if self.average is None else [*self.average.parameters(), *self.average.buffers()]
        for tensor in [*self.model.parameters(), *self.model.buffers(), *states, *averages]:
            if isinstance(tensor, torch.Tensor):
                own = local_of(tensor.detach()).cpu().contiguous().reshape(-1)
                found.update(own.view(torch.uint8).numpy().tobytes())
            else:
                found.update(repr(tensor).encode())
        return f"{found.hexdigest()} {self.schedule.get_last_lr()}"


def make_trouble(fault: str, step: int, knobs: Any) -> None:
    """Let the device fail around the snapshot of a step, as `device_failures.py` asks."""
    if step == FAILS_AT and fault == "memory":
        knobs.refuse_memory_in(0)
    elif step == FAILS_AT and fault == "memory-in-the-copy":
        real = DeviceCopier.enqueue

        def enqueue(self: DeviceCopier, *given: Any, **more: Any) -> Any:
            DeviceCopier.enqueue = real  # type: ignore[method-assign]  # as it was
            self._fenced._items = ()  # as for a new plan
            knobs.refuse_memory_in(0)
            return real(self, *given, **more)

        DeviceCopier.enqueue = enqueue  # type: ignore[method-assign]  # in the copy thread
    elif fault == "streams":
        knobs.refuse_streams(step <= FAILS_AT)
    elif fault in ("lost", "lost-in-the-copy") and step == DIES_AT:
        knobs.fail_in(0 if fault == "lost" else 6, 719)


def train(options: argparse.Namespace, knobs: Any) -> None:
    """Train to the end, or to the death that was asked for; say what came of it."""
    rank = int(os.environ.get("RANK", "0"))
    at = torch.device("emu", (rank + options.device) % emulated_device.DEVICES)
    torch.manual_seed(1)
    nets = [Trained(words, options, at) for words in options.nets.split(",")]
    torch.manual_seed(100 + rank)
    failures: list[str] = []
    with Checkpointer(f"{options.folder}/root", snapshot_every=1, persist_every=1000, job=options.job) as ckpt:
        ckpt.on_failure = lambda error: failures.append(f"{type(error).__name__}: {error}")
        ckpt.track(rng=True, **{name: thing for net in nets for name, thing in net.tracked().items()})
        if rank == 0 and options.die == "restore":
            faults.arm("restore.before-lineage")
        knobs.schedule(options.seed, LONGEST_US)
        report = ckpt.restore()
        first = report.step if report else 0
        loop(options, knobs, ckpt, nets, first)
        ckpt._alive()._stager.finish()
        knobs.schedule(0, 0)
        end = {
            "nets": {net.name: net.digest() for net in nets}, "first": first, "failures": failures,
            "snapshots": ckpt.stats["snapshots"], "pinned": knobs.most_pinned_bytes(),
        }  # fmt: skip
    end["contexts"] = knobs.contexts()  # what was let go of has made none either
    Path(f"{options.folder}/end{rank}").write_text(json.dumps(end))


def loop(options: argparse.Namespace, knobs: Any, ckpt: Checkpointer, nets: Sequence[Trained], first: int) -> None:
    """Train from the step after `first` on."""
    rank = int(os.environ.get("RANK", "0"))
    at, dying = torch.device("emu", (rank + options.device) % emulated_device.DEVICES), options.die if rank == 0 else ""
    if dying or options.fault:
        assert ckpt._alive().memory.wait_first(60)  # no snapshot is skipped
    generator = torch.Generator().manual_seed(7 + rank)
    tokens = torch.randint(0, VOCABULARY, (STEPS, ROWS, WORDS), generator=generator)
    wanted = torch.randint(0, CLASSES, (STEPS, ROWS), generator=generator)
    for step in range(first + 1, STEPS + 1):
        losses = [net.step(tokens[step - 1].to(at), wanted[step - 1].to(at)) for net in nets]
        if dying == "step" and step == DIES_AT:
            kill()
        for net in nets:
            net.update()
        if options.fault or (dying == "copy" and step == DIES_AT):
            ckpt._alive()._stager.finish()
        if dying == "copy" and step == DIES_AT:
            die_in_a_copy()
        make_trouble(options.fault, step, knobs)
        ckpt.step(step)
        if options.fault == "memory-in-the-copy":
            ckpt.fence()  # it is the copy thread that is refused memory
        with Path(f"{options.folder}/trace{rank}").open("a") as file:
            file.write(f"{options.life} {step} {' '.join(float(loss.item()).hex() for loss in losses)}\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--nets", default="adamw/mlp/float32")
    parser.add_argument("--kind", choices=("plain", "ddp", "fsdp"), default="plain")
    parser.add_argument("--die", choices=("", "step", "copy", "restore"), default="")
    parser.add_argument("--fault", default="")
    parser.add_argument("--life", type=int, default=int(os.environ.get("FLASHCKPT_RESTART", "0")))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--job", default="device")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--staged", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    knobs = emulated_device.install()
    if options.staged:
        accelerator.registers = lambda api=None: False  # as a device that cannot
    if options.fault == "pins":
        knobs.pin_limit(0)
    if options.kind != "plain":
        torch.accelerator.set_device_index(int(os.environ["RANK"]) % emulated_device.DEVICES)
        collectives.register()
        dist.init_process_group(collectives.NAME)
    train(options, knobs)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
