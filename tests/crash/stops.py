"""Stop one 2x2x2 training run by SIGTERM at random instants, over and over, and prove that nothing is lost.

    PYTHONPATH=tests:. python tests/crash/stops.py --stops 100 --seed 7       # or: make test-restarts STOPS=100

One chain: each launch goes on where the one before stopped, and is stopped at a random instant of its start, its
restore, its first steps or a persist; every third gets a second signal soon after. Each must end with "resume me"
(75), or, where it had not trained yet, by the signal (143), within the grace time, and leave no process but the
daemon. No step is ever trained twice. In the end the chain is run to its last step, and its trace (losses and norms bit
for bit, samples) is compared with that of one unbroken run. The seed is printed.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from support.dlrun import Launch, dlrun, processes_of
from support.ranks import wait_for
from support.training import write_corpus

from flashckpt.errors import RESUME_EXIT_CODE
from flashckpt.trainer.demo.report import compare_traces
from flashckpt.trainer.train.metrics import read_trace

REFUSED = 128 + signal.SIGTERM
DEADLINE_S = 120.0
QUICK_S = 20.0


class LostError(Exception):
    """A promise was broken."""


def require(holds: bool, text: str) -> None:
    if not holds:
        raise LostError(text)


class Chain:
    """One run of eight ranks (DP 2 x TP 2 x PP 2), launched as often as it takes."""

    def __init__(self, folder: Path, source: list[str], name: str) -> None:
        self.folder, self.log = folder / name, folder / name / "log"
        self.folder.mkdir(parents=True)
        (self.folder / "run.toml").write_text(
            "[model]\ndim = 16\nlayers = 2\nheads = 2\nkv_heads = 2\nffn = 32\n"
            "[parallel]\npp = 2\ndp_shard = 2\ntp = 2\n"
            '[train]\nseq_len = 8\nglobal_batch = 8\nmicro_batch = 2\ndevice = "cpu"\n'
            "[optim]\nwarmup_steps = 2\ndecay_steps = 1000\n"
            f'[data]\nsource = {source}\nfolder = "{folder}/tokens"\n'
            f'[checkpoint]\nroot = "{self.folder}/root"\njob = "stops-{os.getpid()}-{name}"\n'
            "snapshot_every = 2\npersist_every = 4\n"
            f'[log]\nfolder = "{self.log}"\nevery = 1000\n'
        )

    def flags(self, steps: int) -> list[object]:
        run = ["--config", self.folder / "run.toml", "--train.steps", steps]
        return ["--standalone", "--nproc-per-node=8", "-m", "flashckpt.trainer", *run]

    def steps(self) -> int:
        """Return how many steps were trained and are not given up."""
        return len(read_trace(self.log / "trace.jsonl"))

    def abandoned(self) -> list[int]:
        return [line["step"] for line in read_trace(self.log / "abandoned.jsonl")]

    def finish(self, steps: int) -> None:
        with dlrun(self.folder, *self.flags(steps)) as launch:
            code = launch.wait(600)
            require(code == 0, f"the run to step {steps} ended with {code}:\n{launch.output}")


def first_step_s(chain: Chain) -> float:
    """Launch once undisturbed until the second step; return the seconds. It is stopped, too."""
    begun = time.monotonic()
    with dlrun(chain.folder, *chain.flags(100000)) as launch:
        launch.until(lambda: chain.steps() >= 2, "two steps")
        seconds = time.monotonic() - begun
        launch.process.send_signal(signal.SIGTERM)
        require(launch.wait() == RESUME_EXIT_CODE, launch.output)
    return seconds


def stop_once(chain: Chain, at_s: float, second_s: float | None) -> tuple[int, int, float]:
    """Launch, send SIGTERM after `at_s` seconds; return exit code, steps trained and seconds until the end."""
    before = chain.steps()
    with dlrun(chain.folder, *chain.flags(100000)) as launch:
        wait_until(launch, at_s)
        launch.process.send_signal(signal.SIGTERM)
        sent = time.monotonic()
        if second_s is not None:
            wait_until(launch, second_s)
            launch.process.send_signal(signal.SIGTERM)
        code = launch.wait(DEADLINE_S)
        trained = chain.steps() - before
        allowed = {RESUME_EXIT_CODE} if trained else {RESUME_EXIT_CODE, REFUSED, -signal.SIGTERM}
        require(code in allowed, f"exit code {code} after {trained} steps:\n{launch.output}")
        require(not chain.abandoned(), f"steps {chain.abandoned()} were lost:\n{launch.output}")
        wait_for(lambda: not ranks_of(chain), what=f"the end of {ranks_of(chain)}", deadline_s=10)
    seconds = time.monotonic() - sent
    require(
        code == RESUME_EXIT_CODE or seconds < QUICK_S, f"{seconds:.0f} s to end what had no state:\n{launch.output}"
    )
    return code, trained, seconds


def wait_until(launch: Launch, seconds: float) -> None:
    end = time.monotonic() + seconds
    wait_for(lambda: time.monotonic() >= end or launch.process.poll() is not None, what="an instant", deadline_s=600)


def ranks_of(chain: Chain) -> list[str]:
    return [command for command in processes_of(chain.folder).values() if "daemon.service" not in command]


def run(folder: Path, stops: int, seed: int) -> None:
    rng, source = random.Random(seed), write_corpus(folder / "text")
    chain = Chain(folder, source, "chain")
    reach_s = first_step_s(chain)
    say(f"seed {seed}: two steps after {reach_s:.1f} s; {stops} stops between 0 and {1.5 * reach_s:.1f} s")
    codes: Counter[int] = Counter()
    for number in range(1, stops + 1):
        at_s = rng.uniform(0.0, 1.5 * reach_s)
        second_s = rng.uniform(0.0, 1.0) if number % 3 == 0 else None
        code, trained, seconds = stop_once(chain, at_s, second_s)
        codes[code] += 1
        say(f"stop {number}: after {at_s:.2f} s, {trained} steps, exit code {code}, {seconds:.1f} s until the end")
    last = chain.steps() + 2
    chain.finish(last)
    require(not chain.abandoned(), f"steps {chain.abandoned()} were lost")
    say(f"exit codes {dict(codes)}; the unbroken run of {last} steps, to compare")
    unbroken = Chain(folder, source, "unbroken")
    unbroken.finish(last)
    traces = [read_trace(one.log / "trace.jsonl") for one in (chain, unbroken)]
    result = compare_traces(traces[0], traces[1], last)
    require(result.identical, f"{result.equal} of {last} steps are equal; {result.first}")
    require(len(traces[0]) == last, "a step was trained twice")
    say(f"{last} steps through {stops} stops: the trace of the unbroken run, bit for bit")


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stops", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="flashckpt-stops-", dir="/var/tmp"))
    memory = Path(tempfile.mkdtemp(prefix="flashckpt-stops-", dir="/dev/shm"))
    os.environ["FLASHCKPT_SHM_DIR"] = str(memory)
    try:
        run(folder, args.stops, args.seed)
    except (LostError, AssertionError) as error:
        say(f"FAILED (seed {args.seed}, files in {folder}): {error}")
        return 1
    finally:
        shutil.rmtree(memory, ignore_errors=True)
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
