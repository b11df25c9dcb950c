"""A training loop on an HDFS root, started by hdfs.py: tells on stdout what it restored and each step's loss and digest."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from support.engine import digest, net

from flashckpt import Checkpointer


def tell(what: str, value: Any) -> None:
    print(json.dumps([what, value]), flush=True)


def main(root: str, options: str, last: int, pause: int) -> None:
    """Train to `last`, which is durable then; with `pause`, tell that this step is durable, and at the end wait for stdin's."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(7)
    ckpt = Checkpointer(
        root, storage_options=json.loads(options), snapshot_every=1, persist_every=2, keep_last=2, job="hdfs"
    )
    ckpt.track(model=model, optimizer=optimizer, rng=True)
    report = ckpt.restore()
    tell("restored", None if report is None else [report.step, sorted(report.tier_bytes)])
    for step in range(1 if report is None else report.step + 1, last + 1):
        batch = torch.randn(8, 24, generator=torch.Generator().manual_seed(step))
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tell("step", [step, loss.item().hex(), digest(model, optimizer)])
        ckpt.step(step)
        if step == pause:
            ckpt.wait(100)
            tell("durable", step)
    if pause:
        sys.stdin.read()
    ckpt.wait(100)
    ckpt.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
