"""nanoGPT for benchmarks/trainer_speed.py: `python trainer_speed_nanogpt.py FOLDER TOKENS '{"dim": 256, ...}'`, in one process.

FOLDER holds nanoGPT's model.py (written for commit 3adf61e). Its train.py is a script; this loop does what that does in a step:
batches of random windows from a memory map of uint16, a rate set for each group, clipping to norm 1, the optimizer of
`configure_optimizers`, gradients set to None, the loss read after each step.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor
from trainer_speed_turns import Over, Turns


def batch(tokens: str, rows: int, length: int) -> tuple[Tensor, Tensor]:
    data = np.memmap(tokens, dtype=np.uint16, mode="r")
    at = torch.randint(len(data) - length - 1, (rows,)).tolist()
    windows = [torch.from_numpy(data[i : i + length + 1].astype(np.int64)) for i in at]
    return torch.stack([window[:-1] for window in windows]), torch.stack([window[1:] for window in windows])


def widen(model: Any, inner: int) -> None:
    """Give the feed-forward parts another width, and the head a separate weight: the products of another model."""
    dim, vocab = model.config.n_embd, model.config.vocab_size
    for block in model.transformer.h:
        block.mlp.c_fc = torch.nn.Linear(dim, inner, bias=False)
        block.mlp.c_proj = torch.nn.Linear(inner, dim, bias=False)
    model.lm_head = torch.nn.Linear(dim, vocab, bias=False)
    model.apply(model._init_weights)


def main() -> None:
    folder, tokens, sizes = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    sys.path.insert(0, folder)
    source: Any = importlib.import_module("model")
    turns = Turns()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    config = source.GPTConfig(
        block_size=sizes["seq_len"], vocab_size=sizes["vocab"], n_layer=sizes["layers"], n_head=sizes["heads"],
        n_embd=sizes["dim"], dropout=0.0, bias=False,
    )  # fmt: skip
    model = source.GPT(config)
    if "inner" in sizes:
        widen(model, sizes["inner"])
    print(f"{sum(parameter.numel() for parameter in model.parameters())} parameters", flush=True)
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu")
    x, y = batch(tokens, sizes["rows"], sizes["seq_len"])
    step = 0
    try:
        while True:
            turns.step_begins()
            step += 1
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * min(1.0, step / 10)
            _, loss = model(x, y)
            began = time.thread_time()
            x, y = batch(tokens, sizes["rows"], sizes["seq_len"])
            turns.data_s += time.thread_time() - began
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    except Over:
        pass


if __name__ == "__main__":
    main()
