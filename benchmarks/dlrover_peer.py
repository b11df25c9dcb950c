"""DLRover as a peer: which version, how to get a Python that has it, and what its launcher sets for a worker. Without torch."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

VERSION = "0.6.1"
SETUP = f'python3 -m venv DIR && DIR/bin/pip install torch==2.13.0 "dlrover[torch]=={VERSION}" numpy grpcio protobuf'
SOCKETS = Path("/tmp/ckpt_sock")  # where DLRover puts them


def environment(rank: int, ranks: int, run: str) -> dict[str, str]:
    """Return what dlrover-run sets for a worker, and a run id that keeps jobs of one machine apart."""
    return {
        "ROLE_NAME": "dlrover-trainer",
        "TORCHELASTIC_RUN_ID": run,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "NODE_RANK": "0",
        "NODE_NUM": "1",
    }


def remove_leftovers(run: str) -> None:
    """Remove sockets and segments of a run whose processes have ended."""
    shutil.rmtree(SOCKETS / run, ignore_errors=True)
    for path in Path("/dev/shm").glob(f"{run}_ckpt_shm_*"):
        path.unlink(missing_ok=True)


def check_dlrover(python: str) -> dict[str, str]:
    """Return the versions in DLRover's Python; exit with 2 where it cannot be used."""
    program = (
        "import importlib.metadata as m, numpy, torch; "
        "import dlrover.trainer.torch.flash_checkpoint.ddp, dlrover.trainer.torch.flash_checkpoint.fsdp; "
        "print(m.version('dlrover'), torch.__version__)"
    )
    try:
        answer = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True, timeout=300)
        dlrover, torch = answer.stdout.split()[-2:]
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        said = error.stderr if isinstance(error, subprocess.CalledProcessError) and error.stderr else str(error)
        print(f"DLRover cannot be imported by {python}:\n{said[-800:]}\nA Python that has it: {SETUP}", file=sys.stderr)
        raise SystemExit(2) from None
    if dlrover != VERSION:
        print(f"note: dlrover {dlrover}, written for {VERSION}", file=sys.stderr)
    return {"dlrover": dlrover, "torch": torch}
