"""What `make gpu` runs, in order: the first parts are those whose results are missed most where the time is over."""

from __future__ import annotations

from dataclasses import dataclass

TESTS = "tests/integration/gpu"


@dataclass(frozen=True, kw_only=True)
class Part:
    """One program.

    Attributes:
        name: In the table and in --parts.
        words: Behind the interpreter; {device}, {seconds}, {json} and {xml} are filled in.
        seconds: Most that it may take; tests also what is left over by then.
        least: With less time than this left it is not begun.
        on_cpu: Words put behind the others with --device cpu: sizes that a laptop has.
    """

    name: str
    words: tuple[str, ...]
    seconds: int
    least: int
    on_cpu: tuple[str, ...] = ()


def tests(name: str, file: str, seconds: int, least: int) -> Part:
    """Return the part that runs one file of tests."""
    words = ("-m", "pytest", "-v", "-p", "no:cacheprovider", "--junitxml={xml}", f"{TESTS}/{file}")
    return Part(name=name, words=words, seconds=seconds, least=least)


def numbers(name: str, program: str, *words: str, seconds: int, least: int, on_cpu: tuple[str, ...] = ()) -> Part:
    """Return the part that runs one program of benchmarks/."""
    common = (f"benchmarks/{program}", "--device={device}", "--seconds={seconds}", "--json={json}")
    return Part(name=name, words=(*common, *words), seconds=seconds, least=least, on_cpu=on_cpu)


PARTS = (
    tests("tests: staging", "test_gpu_staging.py", 50, 20),
    numbers("numbers: bus", "gpu_bus.py", seconds=25, least=15, on_cpu=("--mb=64",)),
    numbers("numbers: 8 GB", "gpu_snapshots.py", "--gb=8", seconds=65, least=40, on_cpu=("--gb=0.05", "--step-s=0.1")),
    numbers(
        "numbers: restart", "gpu_restart.py", "--gb=16", "--standby=1", seconds=90, least=60,
        on_cpu=("--gb=0.05", "--kills=1"),
    ),
    tests("tests: jobs", "test_gpu_jobs.py", 85, 40),
    tests("tests: trainer", "test_gpu_trainer.py", 70, 40),
    numbers("numbers: parts of a restart", "gpu_restore.py", "--gb=16", seconds=45, least=35, on_cpu=("--gb=0.1",)),
    numbers(
        "numbers: every 1, 5, 20", "gpu_intervals.py", "--gb=8", seconds=45, least=30,
        on_cpu=("--gb=0.03", "--step-s=0.05"),
    ),
    numbers(
        "numbers: 32 GB", "gpu_snapshots.py", "--gb=32", "--slots=2", "--methods=flashckpt", seconds=65, least=60,
        on_cpu=("--gb=0.1", "--step-s=0.2"),
    ),
)  # fmt: skip
