"""The published rules of MLPerf Storage's checkpoint workload, and what a run by them says of a store. Pure.

The rules (v3.0, section 4 of Rules.md): every GPU's process writes its part of the checkpoint, ten times, with fsync;
caches are cleared; every process reads its part, ten times; the time is the maximum over processes, the throughput the
minimum. Subset mode is for the 8B model on its 8 processes alone; a run of fewer says so. A result of MLPerf is one
that MLCommons has reviewed: nothing here is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashckpt.bench.layouts import ModelLayout, persisted_bytes, rank_shards
from flashckpt.bench.measure import median, summarise

CHECKPOINTS = 10
BURST_S = 60.0
"""How long stores are known to be fast before they are throttled."""
FOLLOWS = "follows the published rules of MLPerf Storage's checkpoint workload; it is no result of MLPerf"
_WINDOW_S, _FELL, _FASTER = 5.0, 0.7, 1.25


def rank_bytes(layout: ModelLayout, ranks: int) -> list[int]:
    """Return what each of the first `ranks` writes: by its shards, or an even share where not all take part."""
    if ranks < layout.ranks:
        return [layout.total_bytes // layout.ranks] * ranks
    return [persisted_bytes(rank_shards(layout, rank)) for rank in range(ranks)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One checkpoint, written or read by all ranks at once; a value per rank.

    Attributes:
        seconds: From the common start until this rank was through.
        nbytes: What it moved.
        parts: Of each rank, (seconds since its start, bytes) as they went by.
        unsynced_bytes: After the store had said durable: what the kernel had not written; None where it does not tell.
        cached_share: Before the read: the share that lay in this machine's page cache; None as above.
        device_bytes: During the read: what came from a device; None as above.
    """

    seconds: Sequence[float]
    nbytes: Sequence[int]
    parts: Sequence[Sequence[tuple[float, int]]] = ()
    unsynced_bytes: Sequence[int | None] = ()
    cached_share: Sequence[float | None] = ()
    device_bytes: Sequence[int | None] = ()

    @property
    def rate(self) -> float:
        """Bytes per second of all ranks together, by the slowest."""
        return sum(self.nbytes) / max(self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sustained:
    """Rates before and after a fall: `fell_at_s` seconds of writing; None where there was none."""

    before: float
    after: float
    fell_at_s: float | None


def sustained(writes: Sequence[Pass]) -> Sustained:
    """Return whether the rate fell for good while all was written, pauses between checkpoints left out."""
    windows: dict[int, int] = {}
    began = 0.0
    for one in writes:
        for part in one.parts:
            for at_s, nbytes in part:
                window = int((began + at_s) / _WINDOW_S)
                windows[window] = windows.get(window, 0) + nbytes
        began += max(one.seconds)
    rates = [
        windows.get(number, 0) / _WINDOW_S for number in range(int(began / _WINDOW_S))
    ]  # the last one is not whole
    whole = sum(sum(one.nbytes) for one in writes) / began if began else 0.0
    best = Sustained(before=whole, after=whole, fell_at_s=None)
    for cut in range(2, len(rates) - 1):
        before, after = sum(rates[:cut]) / cut, sum(rates[cut:]) / (len(rates) - cut)
        if after < _FELL * before and max(rates[cut:]) < before and after / before < best.after / best.before:
            best = Sustained(before=before, after=after, fell_at_s=cut * _WINDOW_S)
    return best


def findings(writes: Sequence[Pass], reads: Sequence[Pass], device: Mapping[str, float]) -> list[str]:
    """Return what is wrong with a store, one sentence each; none where nothing was found.

    Args:
        writes: All checkpoints, in order.
        reads: The same.
        device: "write" and "read": bytes per second of the device beneath, measured beside it; {} where it is not known.
    """
    found = []
    unsynced = max((sum(value or 0 for value in one.unsynced_bytes) for one in writes), default=0)
    if unsynced:
        found.append(
            f"NOT DURABLE: {unsynced / 1e6:,.0f} MB of a checkpoint were still in this machine's memory when its write had"
            " returned; the store does not fsync"
        )
    rates = {"write": median([one.rate for one in writes]), "read": median([one.rate for one in reads])}
    cached = [value for one in reads for value in one.cached_share if value is not None]
    if max(cached, default=0.0) > 0.01:
        found.append(
            f"CACHED READ: up to {max(cached):.0%} of the files could not be put out of this machine's page cache"
        )
    elif missing := _not_from_a_device(reads):
        found.append(f"CACHED READ: {missing:.0%} of what was read came from no device: a cache in between gave it")
    for way, what in (("write", "NOT DURABLE"), ("read", "CACHED READ")):
        if (
            (limit := device.get(way))
            and rates[way] > _FASTER * limit
            and not any(one.startswith(what) for one in found)
        ):
            found.append(f"{what}: {way}s at {rates[way] / 1e9:.2f} GB/s, the device beneath does {limit / 1e9:.2f}")
    rate = sustained(writes)
    if rate.fell_at_s is not None:
        found.append(
            f"BURST: {rate.before / 1e9:.2f} GB/s for {rate.fell_at_s:.0f} s, then {rate.after / 1e9:.2f} GB/s; a run has"
            " the second"
        )
    return found


def _not_from_a_device(reads: Sequence[Pass]) -> float:
    """Return the largest share of a pass that no device delivered, 0 where that is within what a file system may have."""
    worst = 0.0
    for one in reads:
        known = [(got, want) for got, want in zip(one.device_bytes, one.nbytes, strict=False) if got is not None]
        want = sum(want for _, want in known)
        if want:
            worst = max(worst, 1 - sum(got for got, _ in known) / want)
    return worst if worst > 0.1 else 0.0


def results(
    writes: Sequence[Pass], reads: Sequence[Pass], device: Mapping[str, float], departs: str, how_cold: str
) -> dict[str, Any]:
    """Return the document of a run; `rates` is what `flashckpt plan --from` takes, after any burst."""
    rate, long_s = sustained(writes), sum(max(one.seconds) for one in writes)
    notes = (
        []
        if long_s >= BURST_S * 1.25
        else [f"written for {long_s:.0f} s: a burst of {BURST_S:.0f} s cannot be seen in that"]
    )
    if any(value is None for one in writes for value in one.unsynced_bytes):
        notes.append(
            "whether writes are durable is the store's word: it is no file system of this kernel, or one older than 6.5"
        )
    write, read = median([one.rate for one in writes]), median([one.rate for one in reads])
    return {
        "follows": FOLLOWS,
        "departs": departs,
        "checkpoint_bytes": sum(writes[0].nbytes),
        "summary_s": {
            "checkpoint_write_s": summarise([max(one.seconds) for one in writes]),
            "checkpoint_read_s": summarise([max(one.seconds) for one in reads]),
        },
        "bytes_per_s": {
            "write": summarise([one.rate for one in writes]),
            "read": summarise([one.rate for one in reads]),
        },
        "rank_bytes_per_s": {way: _slowest(passes) for way, passes in (("write", writes), ("read", reads))},
        "device_bytes_per_s": dict(device),
        "x_device": {way: value / device[way] for way, value in (("write", write), ("read", read)) if way in device},
        "findings": findings(writes, reads, device),
        "cold": {"how": how_cold},
        "notes": notes,
        "rates": {
            "write_bytes_per_s": write if rate.fell_at_s is None else rate.after,
            "read_bytes_per_s": read,
        },
    }


def _slowest(passes: Sequence[Pass]) -> list[float]:
    """Return the throughput of the slowest rank of each checkpoint: the rules report the minimum."""
    return [min(nbytes / seconds for nbytes, seconds in zip(one.nbytes, one.seconds, strict=True)) for one in passes]
