"""Fuzz every decoder for a while: `make fuzz SECONDS=60`. Ends with the bytes of the first failure of each target."""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import time
import traceback
import warnings
from functools import partial
from pathlib import Path

from support.fuzz_targets import TARGETS
from support.fuzzing import fuzz


def _before(end: float) -> bool:
    return time.monotonic() < end


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10, help="for each target")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    failed = []
    print(f"seed {options.seed}")
    for name, make in TARGETS.items():
        if options.only not in name:
            continue
        with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
            end = time.monotonic() + options.seconds
            try:
                counts = fuzz(make(Path(folder)), options.seed, 1 << 40, partial(_before, end))
            except Exception:  # noqa: BLE001 -- that is what is looked for
                traceback.print_exc()
                failed.append(name)
                continue
        print(f"{name:20} {counts['tried']:9} tried {counts['accepted']:9} accepted", flush=True)
    print("failed:", ", ".join(failed) or "none")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
