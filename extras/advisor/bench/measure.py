"""Measuring: interleaved rounds, medians with spread, and what the figures were measured on.

Used by `flashckpt bench` and by the scripts under benchmarks/. A figure without its spread and
without the load of the machine is not a result, so every document carries both.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flashckpt.bench.host import host_facts
from flashckpt.errors import ConfigError, FormatVersionError

SCHEMA = 1
"""Major version of the JSON documents; readers refuse a larger one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Order statistics of one series, in the unit of the series.

    `spread` is the interquartile range over the median: half of the runs lie within it. With
    fewer than four values it is the whole range over the median.
    """

    n: int
    median: float
    min: float
    max: float
    p95: float
    p99: float
    spread: float

    def text(self, digits: int = 3) -> str:
        """Return `median [min-max]`."""
        return f"{self.median:.{digits}g} [{self.min:.{digits}g}-{self.max:.{digits}g}]"


def percentile(values: Sequence[float], share: float) -> float:
    """Return the nearest-rank percentile (a value that was really measured), `share` in 0..1."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def median(values: Sequence[float]) -> float:
    """Return the middle value, or the mean of the two middle ones."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def summarise(values: Sequence[float]) -> Summary:
    """Return the order statistics of `values`, which may not be empty."""
    if not values:
        raise ValueError("no values to summarise")
    middle = median(values)
    quartiles = len(values) >= 4
    low = percentile(values, 0.25) if quartiles else min(values)
    high = percentile(values, 0.75) if quartiles else max(values)
    return Summary(
        n=len(values),
        median=middle,
        min=min(values),
        max=max(values),
        p95=percentile(values, 0.95),
        p99=percentile(values, 0.99),
        spread=(high - low) / abs(middle) if middle else 0.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRun:
    """One run of one case: wall seconds, CPU seconds of this process and its waited-for children, what it returned."""

    wall_s: float
    cpu_s: float
    value: Any = None


def cpu_seconds() -> float:
    """Return user + system seconds of this process, all its threads and the children it has waited for."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def timed(run: Callable[[], Any]) -> TimedRun:
    """Run once and return wall and CPU seconds with the result."""
    cpu, start = cpu_seconds(), time.perf_counter()
    value = run()
    return TimedRun(wall_s=time.perf_counter() - start, cpu_s=cpu_seconds() - cpu, value=value)


def interleave(
    cases: Mapping[str, Callable[[], Any]],
    rounds: int,
    *,
    warmup: int = 0,
) -> dict[str, list[TimedRun]]:
    """Run every case once per round and return the timings per case.

    Machines drift (page cache, neighbours, clocks). Cases that run in blocks are compared across
    that drift; cases that take turns are not. The order rotates from one round to the
    next, and turns round after a full rotation: no case always runs first or always behind the same other one.

    Args:
        cases: Name -> callable without arguments. Its result is kept as `TimedRun.value`; set-up that should not be
            counted belongs into the callable before it times itself and returns its own seconds.
        rounds: Measured rounds, at least 1.
        warmup: Rounds before them that are run and thrown away.

    Returns:
        One list of `rounds` timings per case, in the order of the rounds.
    """
    if rounds < 1 or not cases:
        raise ValueError("interleave needs at least one case and one round")
    names = list(cases)
    result: dict[str, list[TimedRun]] = {name: [] for name in names}
    for number in range(-warmup, rounds):
        turn = number % len(names)
        order = names[turn:] + names[:turn]
        for name in reversed(order) if number // len(names) % 2 else order:
            timing = timed(cases[name])
            if number >= 0:
                result[name].append(timing)
    return result


def _machine_busy_seconds() -> float:
    """Return the CPU seconds that all processors of this machine have spent outside idle and I/O wait."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _idle, _wait, irq, softirq, *rest = [int(value) for value in fields]
    steal = int(rest[0]) if rest else 0
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class LoadWatch:
    """What the rest of the machine did while we measured.

    The load average before the run tells whether the machine was quiet; during the run it counts our own
    ranks, so there the CPU seconds that were not ours are counted instead.
    """

    cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    load_before: float = field(default_factory=lambda: os.getloadavg()[0])
    _start: float = field(default_factory=time.perf_counter)
    _busy: float = field(default_factory=_machine_busy_seconds)
    _own: float = field(default_factory=cpu_seconds)

    def report(self) -> dict[str, Any]:
        """Return load average before, CPU cores used by others meanwhile, and whether that counts as loaded.

        Call it after the children of the benchmark have been waited for: only then is their time ours.
        """
        wall = max(time.perf_counter() - self._start, 1e-9)
        elsewhere = max(0.0, (_machine_busy_seconds() - self._busy) - (cpu_seconds() - self._own)) / wall
        reasons = []
        if self.load_before > self.cores:
            reasons.append(f"load average {self.load_before:.1f} before the run on {self.cores} cores")
        if elsewhere > 0.25 * self.cores:
            reasons.append(f"other processes used {elsewhere:.1f} of {self.cores} cores meanwhile")
        return {
            "cores": self.cores,
            "load_before": round(self.load_before, 2),
            "other_cores": round(elsewhere, 2),
            "loaded": bool(reasons),
            "reasons": reasons,
        }


def require_quiet(load: LoadWatch | None = None) -> None:
    """Refuse to measure on a machine with more than one runnable thread per core.

    Raises:
        ConfigError: The load average of the last minute is above the number of cores.
    """
    load = load or LoadWatch()
    if load.load_before > load.cores:
        raise ConfigError(
            "this machine is too busy to measure",
            found=f"load average {load.load_before:.1f}",
            expected=f"at most {load.cores} (one runnable thread per core), as --require-quiet asks",
            state="Nothing was written.",
            remedy="wait for the other work to end, or drop --require-quiet: the result is then marked as loaded",
        )


def document(
    kind: str, arguments: Mapping[str, Any], results: Mapping[str, Any], *, load: LoadWatch, paths: Sequence[Path] = ()
) -> dict[str, Any]:
    """Return the JSON document of one benchmark: schema version, host facts, load, arguments, results.

    Args:
        kind: "shm", "store", "job" or the name of a script under benchmarks/.
        arguments: What was asked for.
        results: The figures; units last in the names, GB = 10^9 bytes. Dataclasses are turned into objects.
        load: Started before the run.
        paths: Files or folders whose file system the figures depend on.
    """
    return {
        "schema": SCHEMA,
        "kind": kind,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "arguments": dict(arguments),
        "host": host_facts(paths),
        "load": load.report(),
        "results": plain(results),
    }


def plain(value: Any) -> Any:
    """Return `value` with dataclasses, mappings and tuples turned into what JSON knows; NaN and infinity become None."""
    if hasattr(value, "__dataclass_fields__"):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Write a document; a reader sees the old file or the whole new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(plain(result), indent=1, sort_keys=False) + "\n")
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):  # a name too long cannot be removed either
            temporary.unlink(missing_ok=True)
        raise ConfigError(
            f"{path} cannot be written", found=str(error), remedy="name a file in a folder you own"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a document and check its schema version.

    Raises:
        ConfigError: Not there, not JSON, or not a document of ours.
        FormatVersionError: Written by a newer flashckpt.
    """
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a benchmark result", found=str(error)) from error
    if not isinstance(result, dict) or not isinstance(result.get("schema"), int) or "results" not in result:
        raise ConfigError(
            f"{path} is not a result of flashckpt bench", expected='a JSON object with "schema" and "results"'
        )
    if result["schema"] > SCHEMA:
        raise FormatVersionError(
            f"{path} was written by a newer flashckpt",
            found=f"schema {result['schema']}",
            expected=f"at most {SCHEMA}",
            remedy="pip install -U flashckpt",
        )
    return result
