"""A user's program with DeepSpeed, that says which samples each step trained and with which losses.

deepspeed_job.py FOLDER --stage N [--dtype bf16] [--steps N] [--kill-at STEP] [--drop P] [--plain] [--dlrover] [--dump]
--plain: without flashckpt. --dlrover: by the call shape of DLRover's DeepSpeedCheckpointer. --dump: each rank writes what was restored, and what it ends with: the weights and moments as
DeepSpeed gathers them, and what the model computes with.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
from pathlib import Path

import torch

os.environ.update(DS_ACCELERATOR="cpu")
import deepspeed
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch.utils.data import DataLoader, Dataset

SAMPLES, BATCH, MICRO = 50, 8, 2
SCALE = {"initial_scale_power": 14, "loss_scale_window": 3, "hysteresis": 1}
KEYS = ("exp_avg", "exp_avg_sq")


class Counted(Dataset):  # type: ignore[type-arg]
    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        x = torch.randn(16, generator=torch.Generator().manual_seed(i))
        return x, x.sum(dim=0, keepdim=True), i


class Model(torch.nn.Module):
    """Odd sizes, so that no piece ends where a parameter does; a parameter that is not trained, and a buffer."""

    def __init__(self, drop):
        super().__init__()
        self.first = torch.nn.Linear(16, 13)
        self.frozen = torch.nn.Linear(13, 13)
        self.register_buffer("mean", torch.zeros(13))
        self.drop = torch.nn.Dropout(drop)
        self.second = torch.nn.Linear(13, 7)
        self.last = torch.nn.Linear(7, 1)
        self.frozen.requires_grad_(requires_grad=False)

    def forward(self, x):
        x = torch.tanh(self.frozen(self.first(x)))
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.last(torch.tanh(self.second(self.drop(x))))


def config_of(given):
    return {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": MICRO,
        "zero_optimization": {"stage": given.stage, "stage3_param_persistence_threshold": 20},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        **(
            {}
            if given.dtype == "fp32"
            else {given.dtype: {"enabled": True, **(SCALE if given.dtype == "fp16" else {})}}
        ),
        **given.config,
    }


def engine_of(given):
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled at the first start
    get_accelerator().is_fp16_supported = lambda: True  # torch computes with it on any processor, if slowly
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = Model(given.drop)
    decayed = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config_of(given))
    torch.manual_seed(dist.get_rank())
    return engine


def inner(engine):
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def gathered(engine):
    """Return weights and moments as DeepSpeed itself puts them together, and what the model computes with."""
    found = {}
    trained = [(name, param) for name, param in engine.module.named_parameters() if param.requires_grad]
    if engine.zero_optimization():
        for name, param in trained:
            found[name] = safe_get_full_fp32_param(param)
            found.update((f"{name}.{key}", safe_get_full_optimizer_state(param, key)) for key in KEYS)
    else:
        for place, param in enumerate(p for group in inner(engine).param_groups for p in group["params"]):
            found[f"{place}"] = param.detach()
            found.update((f"{place}.{key}", inner(engine).state[param][key]) for key in KEYS)
    steps = {float(state["step"]) for state in inner(engine).state.values()}
    found["steps"] = torch.tensor(sorted(steps))
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        for name, param in engine.module.named_parameters():
            found[f"low.{name}"] = param.detach().float()
        found.update((f"buffer.{name}", buffer.float()) for name, buffer in engine.module.named_buffers())
        return {name: tensor.clone() for name, tensor in found.items()}


class Training:
    def __init__(self, given, engine):
        from flashckpt.sampler import ElasticSampler

        self.given, self.engine = given, engine
        rank, size = dist.get_rank(), dist.get_world_size()
        self.sampler = ElasticSampler(Counted(), dp_rank=rank, dp_size=size, global_batch_size=BATCH, seed=1)
        own = torch.Generator()  # an iterator begins with a draw, which dropout would notice after a restart
        self.loader = DataLoader(Counted(), batch_size=MICRO, sampler=self.sampler, generator=own)
        self.seen, self.losses = [], []

    def train(self, x, y, number):
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.given.dtype]
        loss = torch.nn.functional.mse_loss(self.engine(x.to(dtype)).float(), y)
        self.engine.backward(loss)
        self.engine.step()
        self.seen += number.tolist()
        self.losses.append(loss.item())

    def report(self, step, file):
        numbers, loss = ",".join(map(str, self.seen)), sum(self.losses) / len(self.losses)
        engine = self.engine
        counts = engine.global_steps, engine.global_samples, engine.skipped_steps, engine.lr_scheduler.get_last_lr()
        scale = getattr(engine.optimizer, "loss_scale", 1.0)
        print(step, numbers, loss.hex(), *counts, scale, file=file, flush=True)
        self.seen.clear()
        self.losses.clear()
        if self.given.kill_at == step and dist.get_rank() == 1 and os.environ.get("FLASHCKPT_RESTART") == "0":
            os.kill(os.getpid(), signal.SIGKILL)

    def commit(self):
        """What a tracked sampler is told by every step."""
        if self.engine.micro_steps % self.engine.gradient_accumulation_steps() == 0:
            self.sampler.commit()

    def run(self, step, file):
        """Train; `step` is called after every batch and tells whether to stop."""
        done = self.engine.global_steps
        for _ in self.sampler.epochs(9):
            for batch in self.loader:
                self.train(*batch)
                if self.engine.global_steps > done:
                    done += 1
                    self.report(done, file)
                if step() or done == self.given.steps:
                    return


def parsed():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--kill-at", type=int)
    parser.add_argument("--drop", type=float, default=0.0)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--dlrover", action="store_true")
    parser.add_argument("--dump", action="store_true")
    parser.add_argument("--config", type=json.loads, default={})
    return parser.parse_args()


def trained_with_flashckpt(given, training, file, dump):
    from flashckpt.integrations.deepspeed import FlashCheckpoint

    def step():
        flash.step(persist=flash.steps + 1 == given.steps)
        return flash.should_stop

    options = {"data": training.loader, "snapshot_every": 1, "persist_every": 4}
    with FlashCheckpoint(training.engine, given.folder / "root", **options) as flash:
        if flash.restore():
            dump("begin")
        training.run(step, file)


def trained_with_dlrovers_calls(given, training, file, dump):
    from flashckpt.integrations.dlrover import DeepSpeedCheckpointer, StorageType

    engine, root = training.engine, str(given.folder / "root")
    flash = DeepSpeedCheckpointer(engine, root)
    place, client = flash.load_checkpoint(root)
    if place is not None:
        training.sampler.load_state_dict(client["sampler"])
        dump("begin")
    seen = engine.global_steps

    def step():
        nonlocal seen
        training.commit()
        if engine.global_steps > seen:
            seen = engine.global_steps
            kind = StorageType.DISK if seen % 4 == 0 or seen == given.steps else StorageType.MEMORY
            flash.save_checkpoint(root, seen, {"sampler": training.sampler.state_dict()}, storage_type=kind)

    training.run(step, file)
    flash.wait_latest_checkpoint(120)
    flash.close()


def main():
    given = parsed()
    training, name = Training(given, engine_of(given)), f"rank{dist.get_rank()}"

    def dump(when):
        if given.dump:
            torch.save(gathered(training.engine), given.folder / f"{name}-{when}.pt")

    with (given.folder / f"{name}.txt").open("a") as file:
        if given.plain:
            training.run(training.commit, file)
        else:
            (trained_with_dlrovers_calls if given.dlrover else trained_with_flashckpt)(given, training, file, dump)
    dump("end")
    dist.destroy_process_group()  # a process that ends with one may be aborted by gloo


if __name__ == "__main__":
    main()
