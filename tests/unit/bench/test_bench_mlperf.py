"""`bench job --like mlperf`: three stores that lie are found, one that does not is not; the rules' sizes; the answer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from flashckpt.bench.host import evict
from flashckpt.bench.layouts import DEFAULTS, scaled
from flashckpt.bench.mlperf import Pass, findings, rank_bytes, results, sustained
from flashckpt.bench.mlperf_rank import PageStream, StorageRank, device_bytes, stamps, unsynced_bytes
from flashckpt.errors import DamagedError
from flashckpt.storage.posix import PosixStore
from flashckpt.storage.store import PART_BYTES

NBYTES = PART_BYTES + 12_288


class Unsynced(PosixStore):
    """Says that an object is durable while the kernel has it in memory."""

    def put_object(self, key: str, parts: Iterable[memoryview], nbytes: int | None = None) -> None:
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            for part in parts:
                file.write(part)


class Caching(PosixStore):
    """Keeps what it was given, as a proxy or a gateway does, and reads from there."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.held: dict[str, bytes] = {}

    def put_object(self, key: str, parts: Iterable[memoryview], nbytes: int | None = None) -> None:
        self.held[key] = b"".join(parts)
        super().put_object(key, [memoryview(self.held[key])], nbytes)

    def get_range(self, key: str, start: int, out: memoryview) -> None:
        out[:] = self.held[key][start : start + len(out)]


class Throttled:
    """20 MB/s until 60 s of writing are used up, then 5: its own clock, and no bytes."""

    url = "throttled://"

    def __init__(self) -> None:
        self.now_s = self.busy_s = 0.0

    def put_object(self, key: str, parts: Iterable[memoryview], nbytes: int | None = None) -> None:
        del key, nbytes
        for part in parts:
            spent_s = len(part) / (2e7 if self.busy_s < 60 else 0.5e7)
            self.busy_s += spent_s
            self.now_s += spent_s


def passes(rank: StorageRank, checkpoints: int = 2) -> tuple[list[Pass], list[Pass]]:
    """Run one rank as the run does."""
    written = [rank.write(number) for number in range(checkpoints)]
    cold = rank.make_cold(checkpoints, drop=False)
    read = [rank.read(number) for number in range(checkpoints)]
    writes = [Pass(**{key: [value] for key, value in one.items()}) for one in written]
    return writes, [
        Pass(**{key: [value] for key, value in one.items()}, cached_share=[cold["cached_share"]]) for one in read
    ]


def on_a_device(folder: Path) -> None:
    """Skip where files are in memory anyhow, or the kernel cannot tell."""
    path = folder / "probe"
    path.write_bytes(bytes(1 << 20))
    if evict(path) > 0 or unsynced_bytes(path) is None:
        pytest.skip("needs a file system on a device, and cachestat of Linux 6.5")
    before = device_bytes()
    path.read_bytes()
    if device_bytes() - before < 1 << 20:
        pytest.skip("the kernel does not count what this file system reads")


def test_an_honest_store_has_no_findings(tmp_path: Path) -> None:
    on_a_device(tmp_path)
    assert findings(*passes(StorageRank(PosixStore(tmp_path), tmp_path, 0, NBYTES)), {}) == []


def test_a_store_that_does_not_fsync_is_found(tmp_path: Path) -> None:
    on_a_device(tmp_path)
    found = findings(*passes(StorageRank(Unsynced(tmp_path), tmp_path, 0, NBYTES)), {})
    assert [one.partition(":")[0] for one in found] == ["NOT DURABLE"], found
    assert "17 MB of a checkpoint" in found[0]


def test_a_store_that_reads_from_a_cache_is_found(tmp_path: Path) -> None:
    on_a_device(tmp_path)
    found = findings(*passes(StorageRank(Caching(tmp_path), tmp_path, 0, NBYTES)), {})
    assert found == ["CACHED READ: 100% of what was read came from no device: a cache in between gave it"]


def test_pages_that_stay_in_memory_are_found() -> None:
    one = Pass(seconds=[1.0], nbytes=[100], cached_share=[0.5], device_bytes=[0], unsynced_bytes=[0])
    assert findings([one], [one], {})[0].startswith("CACHED READ: up to 50%")


def test_a_burst_that_ends_after_a_minute_is_found_and_not_planned_with() -> None:
    store: Any = Throttled()
    rank = StorageRank(store, None, 0, 3 * PART_BYTES, clock=lambda: store.now_s)
    writes = [Pass(**{key: [value] for key, value in rank.write(number).items()}) for number in range(40)]
    read = Pass(seconds=[1.0], nbytes=[1 << 30])
    rate = sustained(writes)
    assert rate.fell_at_s in (60, 65)  # windows of 5 s
    made = results(writes, [read], {}, "", "")
    assert made["findings"][0].startswith("BURST: 0.02 GB/s for 6")
    assert made["rates"]["write_bytes_per_s"] == pytest.approx(0.5e7, rel=0.2)
    assert sustained(writes[:8]).fell_at_s is None  # over before it was throttled
    assert "a burst of 60 s cannot be seen" in results(writes[:8], [read], {}, "", "")["notes"][0]


def test_rates_that_only_vary_or_that_recover_are_no_burst() -> None:
    varying = [(1.0 * second, (900 + 200 * (second % 3)) << 20) for second in range(120)]
    recovering = [(1.0 * second, (100 if 60 <= second < 100 else 1000) << 20) for second in range(120)]
    for parts in (varying, recovering):
        assert sustained([Pass(seconds=[120.0], nbytes=[1], parts=[parts])]).fell_at_s is None


@pytest.mark.parametrize("way", ["write", "read"])
def test_what_is_faster_than_the_device_beneath_is_found(way: str) -> None:
    one = Pass(seconds=[1.0, 2.0], nbytes=[4 << 30, 4 << 30])
    assert findings([one], [one], {}) == []
    assert len(findings([one], [one], {way: 1e9})) == 1
    assert findings([one], [one], {way: 4e9}) == []


def test_the_slowest_rank_counts() -> None:
    one = Pass(seconds=[1.0, 4.0], nbytes=[100, 100])
    assert one.rate == 50
    made = results([one], [one], {}, "", "")
    assert made["summary_s"]["checkpoint_write_s"].median == 4
    assert made["rank_bytes_per_s"]["write"] == [25]


@pytest.mark.parametrize(
    ("name", "gib"), [("llama3-8b", 105), ("llama3-70b", 912), ("llama3-405b", 5290), ("llama-1t", 18000)]
)
def test_sizes_are_those_of_the_rules(name: str, gib: int) -> None:
    layout = DEFAULTS[name]
    assert layout.total_bytes / 2**30 == pytest.approx(gib, rel=0.15)
    assert sum(rank_bytes(layout, 8)) == pytest.approx(layout.total_bytes * 8 / layout.ranks)


def test_in_default_mode_every_rank_writes_its_shards_and_all_together_the_whole() -> None:
    layout = scaled(DEFAULTS["llama3-8b"], 1 / 64)
    parts = rank_bytes(layout, layout.ranks)
    assert sum(parts) == layout.total_bytes


def test_objects_differ_in_every_page_and_are_the_same_when_sent_again() -> None:
    ring = memoryview(bytearray(2 * PART_BYTES))
    one, other = (PageStream(ring, NBYTES, seed, lambda _: None) for seed in (1, 2))
    first = [stamps(part).tolist() for part in one]
    assert first == [stamps(part).tolist() for part in one]
    assert not set(first[0] + first[1]) & {value for part in other for value in stamps(part).tolist()}
    assert len(first[1]) == 3


def test_other_bytes_are_an_error(tmp_path: Path) -> None:
    rank = StorageRank(PosixStore(tmp_path), tmp_path, 0, NBYTES)
    rank.write(0)
    with (tmp_path / rank.key(0)).open("r+b") as file:
        file.seek(PART_BYTES)
        file.write(bytes([255] * 8))
    with pytest.raises(DamagedError, match="other bytes"):
        rank.read(0)
