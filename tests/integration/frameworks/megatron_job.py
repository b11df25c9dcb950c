"""A user's program with megatron-core and the call shapes of DLRover, that says the loss of each iteration.

megatron_job.py FOLDER --optimizer distributed|plain --dtype bf16 [--tp N] [--steps N] [--kill-at STEP] [--drop P] [--plain]
[--dist-ckpt]. --plain: without flashckpt. --dist-ckpt: by the functions of megatron_dist_ckpt. Each rank writes what was
restored and what it ends with: the model, and what the optimizer has as Megatron itself gathers it.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from integration.frameworks import megatron_cpu

WORDS, LENGTH, BATCH = 32, 8, 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def parsed():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--optimizer", default="distributed")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--kill-at", type=int)
    parser.add_argument("--drop", type=float, default=0.0)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--dist-ckpt", action="store_true")
    return parser.parse_args()


def model_of(given):
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        hidden_dropout=given.drop,
        attention_dropout=given.drop,
        use_cpu_initialization=True,
        bf16=given.dtype == "bf16",
        fp16=given.dtype == "fp16",
        params_dtype=DTYPES[given.dtype],
        pipeline_dtype=DTYPES[given.dtype],
        tensor_model_parallel_size=given.tp,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
    )
    spec = get_gpt_layer_local_spec(normalization="LayerNorm")
    model = GPTModel(config, spec, vocab_size=WORDS, max_sequence_length=LENGTH)
    model.register_buffer("seen", torch.zeros(()))
    model.embedding.position_embeddings.weight.requires_grad_(requires_grad=False)
    wrapped = model if given.dtype == "fp32" else Float16Module(config, model)
    is_dealt = given.optimizer == "distributed"
    parallel = DistributedDataParallelConfig(use_distributed_optimizer=is_dealt, grad_reduce_in_fp32=True)
    return [DistributedDataParallel(config, parallel, wrapped)]


def optimizer_of(given, model):
    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        min_lr=1e-4,
        weight_decay=0.1,
        bf16=given.dtype == "bf16",
        fp16=given.dtype == "fp16",
        params_dtype=DTYPES[given.dtype],
        use_distributed_optimizer=given.optimizer == "distributed",
        initial_loss_scale=2.0**17,
        loss_scale_window=3,
        hysteresis=1,
    )
    optimizer = get_megatron_optimizer(config, model)
    steps = {"lr_warmup_steps": 2, "lr_decay_steps": 20, "wd_incr_steps": 20}
    decay = {"start_wd": 0.1, "end_wd": 0.1, "wd_incr_style": "constant", "lr_decay_style": "cosine"}
    return optimizer, OptimizerParamScheduler(optimizer, init_lr=0.0, max_lr=1e-2, min_lr=1e-4, **steps, **decay)


def trained(model, optimizer, scheduler, iteration):
    """Train one iteration; return the loss of this rank's rows."""
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    rows = torch.randint(0, WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(iteration))[rank::size]
    model[0].zero_grad_buffer()
    optimizer.zero_grad()
    mask = torch.ones(LENGTH, LENGTH).tril()[None, None] < 0.5
    places = torch.arange(LENGTH).expand_as(rows)
    loss = model[0](rows, places, mask, labels=rows.roll(-1, 1)).float().mean()
    optimizer.scale_loss(loss).backward()
    finalize_model_grads(model)
    is_good, _, _ = optimizer.step()
    if is_good:
        scheduler.step(increment=BATCH)
    model[0].module.get_buffer("seen" if not hasattr(model[0].module, "module") else "module.seen").add_(1.0)
    return loss.item()


def gathered(model, optimizer):
    """Return the model, and what the optimizer has as Megatron itself puts it together."""
    found = {f"model.{k}": v.clone() for k, v in model[0].state_dict().items() if isinstance(v, torch.Tensor)}
    for number, one in enumerate(optimizer.chained_optimizers):
        if hasattr(one, "gbuf_ranges"):
            for buffer, of_types in (one.get_parameter_state_dp_zero() or {}).items():
                if isinstance(of_types, dict):
                    for tensors in of_types.values():
                        named = {k: v for k, v in tensors.items() if isinstance(v, torch.Tensor)}
                        found.update((f"{number}.{buffer}.{key}", value) for key, value in named.items())
            continue
        state = one.state_dict()
        state = state.get("optimizer", state)
        for param, own in state["state"].items():
            found.update((f"{number}.{param}.{key}", value.clone()) for key, value in own.items())
    lrs = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    found["settings"] = torch.tensor([*sum(lrs, ()), float(optimizer.get_loss_scale())], dtype=torch.float64)
    steps = {float(state["step"]) for one in optimizer.chained_optimizers for state in one.optimizer.state.values()}
    found["steps"] = torch.tensor(sorted(steps))
    return found


def main():
    given = parsed()
    logging.getLogger("megatron").setLevel(logging.ERROR)  # it warns of generators that are no card's
    dist.init_process_group("gloo")
    megatron_cpu.install()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=given.tp)
    torch.manual_seed(0)
    model_parallel_cuda_manual_seed(123)
    model = model_of(given)
    optimizer, scheduler = optimizer_of(given, model)
    torch.manual_seed(dist.get_rank())
    name, things = f"rank{dist.get_rank()}", (model, optimizer, scheduler)

    def dump(when):
        torch.save(gathered(model, optimizer), given.folder / f"{name}-{when}.pt")

    with (given.folder / f"{name}.txt").open("a") as file:

        def train(iteration):
            loss = trained(*things, iteration)
            print(iteration, loss.hex(), float(optimizer.get_loss_scale()), file=file, flush=True)

        if given.plain:
            for iteration in range(1, given.steps + 1):
                train(iteration)
        else:
            kept(given, things, train, dump)
    dump("end")
    dist.destroy_process_group()


def kept(given, things, train, dump):
    from flashckpt.integrations import dlrover_megatron, dlrover_megatron_dist_ckpt

    calls = dlrover_megatron_dist_ckpt if given.dist_ckpt else dlrover_megatron
    root = str(given.folder / "root")
    begun, flops = calls.load_checkpoint(*things, checkpoint_dir=root)
    print(f"continues at {begun} {flops}\n", end="", flush=True)  # one write: all ranks have one output
    if begun:
        dump("begin")
    for iteration in range(begun + 1, given.steps + 1):
        train(iteration)
        flops += 100.0
        kind = calls.StorageType.DISK if iteration % 4 == 0 or iteration == given.steps else calls.StorageType.MEMORY
        calls.save_checkpoint(iteration, *things, flops, kind, checkpoint_dir=root)
        if given.kill_at == iteration and dist.get_rank() == 1 and os.environ.get("FLASHCKPT_RESTART") == "0":
            os.kill(os.getpid(), signal.SIGKILL)
    calls.wait_latest_checkpoint(120)
    calls.close_checkpoints()


if __name__ == "__main__":
    main()
