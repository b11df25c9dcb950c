"""What a job waits for at its first start: from the command until its script has run, under python, torchrun and dlrun.

The script imports torch, and by `--optimizer` makes an optimizer, with which torch imports a third more. Each way in turns, all
files in the page cache. "python" is the limit: the same script, with no launcher and no process group.

    .venv/bin/python benchmarks/first_start.py [--ranks 1] [--rounds 7] [--json FILE]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from end_to_end import show, summaries

from flashckpt.bench.measure import LoadWatch, document, interleave, write_json

SCRIPTS = {
    "torch": "import torch\n",
    "torch and an optimizer": "import torch\ntorch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])\n",
}
DONE = "import os, sys, time\nopen(f'{sys.argv[1]}/{os.environ.get(\"RANK\", 0)}', 'w').write(str(time.monotonic()))\n"


def measured(command: list[str], script: Path, ranks: int) -> Callable[[], float]:
    """Return what runs a command, and gives the seconds until the last rank's script came to its end."""

    def run() -> float:
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run([*command, str(script), folder], check=True, capture_output=True, env=environment)
            return max(float((Path(folder) / str(rank)).read_text()) for rank in range(ranks)) - began

    return run


def main() -> int:
    """Parse arguments; run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    load, results = LoadWatch(), {}
    flags = [f"--nproc-per-node={args.ranks}"]
    for name, text in SCRIPTS.items():
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder) / "train.py"
            script.write_text(text + DONE)
            ways = {
                "python": measured([sys.executable], script, 1),
                "torchrun": measured([sys.executable, "-m", "torch.distributed.run", *flags], script, args.ranks),
                "dlrun": measured([sys.executable, "-m", "flashckpt.daemon.run", *flags], script, args.ranks),
            }
            timings = interleave(ways, args.rounds, warmup=1)
        seconds, ratios = summaries({way: [one.value for one in runs] for way, runs in timings.items()}, "python")
        show(f"{args.ranks} ranks, a script that imports {name}", ratios, "python", seconds)
        results[name] = {"seconds": seconds, "x_python": ratios}
    made = document("first start", vars(args) | {"json": None}, results, load=load, paths=[Path(tempfile.gettempdir())])
    print(f"\nload average {made['load']['load_before']} before, {made['load']['other_cores']} cores used by others")
    if args.json:
        write_json(args.json, made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
