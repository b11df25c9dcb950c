"""DLRover's side of `torn.py`: the agent that hosts the saver, and a worker that saves one state after the other. In DLRover's Python.

    python torn_dlrover.py agent DIR
    python torn_dlrover.py sharded|full DIR BYTES

Every element of the state is the number of its step, so that a mix of two steps shows itself.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

TENSORS = 16


def agent(folder: Path) -> None:
    """Host the saver; at a line on stdin do what dlrover-run's agent does when a worker has failed."""
    saver = importlib.import_module("dlrover.python.elastic_agent.torch.ckpt_saver").AsyncCheckpointSaver
    saver.start_async_saving_ckpt()
    say({"event": "ready"})
    for line in sys.stdin:
        if line.strip() == "failed":
            saver._saver_instance.save_shm_to_storage()
            tracker = folder / "dlrover_latest.txt"
            say({"event": "saved", "tracker": tracker.read_text().strip() if tracker.exists() else None})
    if saver._saver_instance is not None:
        saver._saver_instance.close()
    os._exit(0)  # its threads never end


def worker(engine: str, folder: Path, nbytes: int) -> None:
    """Save step 1 to disk, then one step after the other into memory, saying what is complete, until killed."""
    torch: Any = importlib.import_module("torch")
    dist: Any = importlib.import_module("torch.distributed")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tensors = {f"model.{n:02}": torch.zeros(nbytes // TENSORS // 4) for n in range(TENSORS)}
    save = sharded(folder, tensors) if engine == "sharded" else full(folder, tensors)
    step = 0
    while True:
        step += 1
        for tensor in tensors.values():
            tensor.fill_(float(step))
        say({"event": "take", "step": step})
        save(step)
        say({"event": "complete", "step": step})


def full(folder: Path, tensors: dict[str, Any]) -> Any:
    """The engine for whole states (DDP): the first save goes to disk, as in a job that persists now and then."""
    ddp = importlib.import_module("dlrover.trainer.torch.flash_checkpoint.ddp")
    kinds = importlib.import_module("dlrover.trainer.torch.flash_checkpoint.checkpointer").StorageType
    checkpointer = ddp.DdpCheckpointer(str(folder))
    tracker = folder / "dlrover_latest.txt"

    def save(step: int) -> None:
        checkpointer.save_checkpoint(step, tensors, storage_type=kinds.DISK if step == 1 else kinds.MEMORY)
        while step == 1 and not tracker.exists():
            time.sleep(0.05)

    return save


def sharded(folder: Path, tensors: dict[str, Any]) -> Any:
    """The engine for sharded states (FSDP): the same tensors as DTensors; its own methods, which copy synchronously."""
    engines = importlib.import_module("dlrover.trainer.torch.flash_checkpoint.fsdp_engine")
    storage = importlib.import_module("dlrover.python.common.storage").get_checkpoint_storage(None)
    parts: Any = importlib.import_module("torch.distributed.tensor")
    mesh = importlib.import_module("torch.distributed.device_mesh").init_device_mesh("cpu", (1,))
    state = {name: parts.DTensor.from_local(tensor, mesh, [parts.Shard(0)]) for name, tensor in tensors.items()}
    engine = engines.FsdpCheckpointEngine(str(folder), storage)
    return lambda step: engine.save_to_memory(step, state, {"model_states": str(folder / str(step))})


_out = os.fdopen(os.dup(1), "w")


def say(what: dict[str, Any]) -> None:
    """Write one line for the harness; everything that libraries print goes to stderr."""
    _out.write(json.dumps(what) + "\n")
    _out.flush()


if __name__ == "__main__":
    os.dup2(2, 1)
    if sys.argv[1] == "agent":
        agent(Path(sys.argv[2]))
    else:
        worker(sys.argv[1], Path(sys.argv[2]), int(float(sys.argv[3])))
