"""One restore of `end_to_end.py`: a new process that makes a model and restores it by one way, or writes for all of them.

Prints when (time.monotonic) the model was made and when it held what was saved. It ends without closing anything, as a crash does:
the snapshot in memory stays for the next run.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path

JOB = "bench-end-to-end"
SAVED = 2.0


def main() -> None:
    """Restore by the way named on the command line: WAY BYTES FOLDER."""
    way, nbytes, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    import torch
    from end_to_end_model import Model

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    model = Model(nbytes, value=SAVED if way == "write" else 0.0)
    made = time.monotonic()
    if way == "write":
        write(model, folder)
    elif way.startswith("flashckpt"):
        restore(model, folder, "memory" if way.endswith("memory") else "storage")
    elif way != "start":
        load(model, way, folder)
    restored = time.monotonic()
    assert way == "start" or model.holds(SAVED), f"{way} did not restore what was saved"
    print(json.dumps({"made": made, "restored": restored}), flush=True)
    os._exit(0)


def write(model: object, folder: Path) -> None:
    """Leave the files of every way, and a snapshot in memory."""
    from flashckpt import Checkpointer
    from flashckpt.bench import rank

    tensors = {name: one.detach() for name, one in model.named_parameters()}  # type: ignore[attr-defined]
    for way in ("torch.save", "dcp.save", "safetensors"):
        rank.write(tensors, rank=0, name=way, directory=str(folder), beside=lambda _: 0.0)
    ckpt = Checkpointer(str(folder / "flashckpt"), snapshot_every=1, persist_every=1, keep_last=1, job=JOB)
    ckpt.track(model=model)
    ckpt.restore()
    step = 0
    while not ckpt.stats.get("snapshots"):
        step += 1
        ckpt.step(step)
        ckpt.wait(600)


def restore(model: object, folder: Path, tier: str) -> None:
    """Restore by flashckpt from one tier."""
    from flashckpt import Checkpointer

    ckpt = Checkpointer(str(folder / "flashckpt"), snapshot_every=1, persist_every=10**6, keep_last=1, job=JOB)
    ckpt.track(model=model)
    report = ckpt.restore()
    assert report is not None
    assert report.tier == tier, f"restored from elsewhere: {report}"


def load(model: object, way: str, folder: Path) -> None:
    """Load what a peer has written into the parameters that exist."""
    import torch

    state = model.state_dict()  # type: ignore[attr-defined]
    if way == "torch.load":
        model.load_state_dict(torch.load(folder / "torch.save.0" / "state.pt", weights_only=True))  # type: ignore[attr-defined]
    elif way == "safetensors":
        from safetensors.torch import load_file

        model.load_state_dict(load_file(folder / "safetensors.0" / "state.safetensors"))  # type: ignore[attr-defined]
    else:
        from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

        dcp_load(state, checkpoint_id=folder / "dcp.save.0" / "dcp", no_dist=True)


if __name__ == "__main__":
    main()
