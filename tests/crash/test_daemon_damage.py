"""Records in shared memory that another process damages under a running job: a clear answer, or what was known before."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
from support.daemons import assert_bitwise, daemon_of, forked, steps, turn_until
from support.fuzz_targets import manifest_bytes, manifest_tree
from support.fuzzing import deep_tuple, mutated
from support.memory_tier import FakeJob
from support.ranks import wait_for

from flashckpt.core.records import digest
from flashckpt.core.superblock import HEADER_COPY_BYTES, encode_header
from flashckpt.daemon.persister.timeouts import DaemonTimeouts
from flashckpt.errors import DamagedError, FlashckptError
from flashckpt.shm.segment import Segment


@pytest.fixture
def job(tmp_path: Path) -> Iterator[FakeJob]:
    fake = FakeJob(str(tmp_path / "root"))
    yield fake
    fake.die()


@pytest.mark.parametrize("name", ["job.msgpack", "generation.msgpack"])
def test_a_record_damaged_under_a_daemon_is_said_and_what_it_said_before_is_used(
    job: FakeJob, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with daemon_of(job) as daemon:
        job.step(5, persist=True)
        turn_until(daemon, lambda: steps(job) == [5], "the first commit")
        path = job.directory.path / name
        good = path.read_bytes()
        rng = random.Random(1)
        for _ in range(20):
            path.write_bytes(mutated(rng, good))
            daemon.turn()
        path.write_bytes(good[:-1])
        job.step(10, persist=True)
        turn_until(daemon, lambda: 10 in steps(job), "a commit beside a damaged record")
        path.write_bytes(good)
        job.step(15, persist=True)
        turn_until(daemon, lambda: 15 in steps(job), "a commit after it was put right")
    assert "its previous content is used" in caplog.text
    assert_bitwise(job, (1, 10))


def test_a_daemon_that_starts_beside_a_damaged_record_says_so_waits_and_ends(job: FakeJob) -> None:
    job.step(5, persist=True)
    path = job.directory.path / "generation.msgpack"
    good = path.read_bytes()
    path.write_bytes(good[:-1])
    with daemon_of(job, DaemonTimeouts(linger_s=60.0)) as daemon:
        assert not daemon.turn()
        status = job.directory.read_status()
        assert status is not None
        assert "is damaged" in status.error
        path.write_bytes(good)
        turn_until(daemon, lambda: steps(job) == [5], "the commit")
        assert daemon.error == ""
    path.write_bytes(good[:-1])
    job.die()
    with forked(job, times=DaemonTimeouts(linger_s=0.0, patience_s=0.0)) as alone:
        wait_for(lambda: alone.poll() is not None, what="the daemon to end where nobody lives")
        assert alone.poll() == 0


def test_a_slot_whose_manifest_would_overflow_a_stack_does_not_end_the_daemon(job: FakeJob) -> None:
    """The bytes carry every digest; they were written by another program, or by a release without the limit."""
    job.step(5, persist=True)
    (path, *_) = job.directory.segments()
    with forked(job, times=DaemonTimeouts(linger_s=60.0)) as daemon:
        wait_for(lambda: steps(job) == [5], what="the first commit")
        job.step(10)
        segment = Segment.attach(path)
        (slot,) = [number for number, header in enumerate(segment.headers()) if header.step == 10]
        header, at = segment.headers()[slot], segment.spec.manifest_at(slot)
        with path.open("r+b") as file:
            file.seek(at)
            tree = manifest_tree(file.read(header.manifest_bytes))
            tree["values"] = {"a": deep_tuple(330)}
            raw = manifest_bytes(tree)
            assert len(raw) <= segment.spec.manifest_capacity
            file.seek(at)
            file.write(raw)
            for copy in (0, 1):
                fields = bytearray(encode_header(header))
                struct.pack_into("<QQ", fields, 64, len(raw), digest(raw))
                file.seek(segment.spec.header_at(slot) + copy * HEADER_COPY_BYTES)
                file.write(fields[:88] + struct.pack("<Q", digest(fields[:88])))
        pin = segment.pin(slot)
        assert pin is not None
        with pin, pytest.raises(DamagedError, match="schema"):
            pin.manifest()
        segment.close()
        job.directory.request("persist-now")
        wait_for(lambda: "schema" in getattr(job.directory.read_status(), "error", ""), what="the daemon to say it")
        job.step(15, persist=True)
        wait_for(lambda: 15 in steps(job), what="the next commit")
        assert daemon.poll() is None, "the daemon lives on"


def test_segments_and_control_page_damaged_at_random_under_a_daemon(job: FakeJob) -> None:
    """Superblocks, headers, manifests and the control page: whatever is hit, only whole snapshots are committed."""
    rng = random.Random(5)
    with daemon_of(job) as daemon:
        for number in range(1, 25):
            job.step(number, persist=number % 3 == 0)
            for path in [*job.directory.segments(), job.directory.control_path]:
                if not path.exists():
                    continue
                with path.open("r+b") as file:
                    at = rng.choice((rng.randrange(2048), 4096 + rng.randrange(4096), 8192 + rng.randrange(512)))
                    good = os.pread(file.fileno(), 8, at)
                    os.pwrite(file.fileno(), rng.randbytes(len(good)), at)
                    with_damage = daemon.turn()
                    os.pwrite(file.fileno(), good, at)
                    assert not with_damage
            try:
                daemon.turn()
            except FlashckptError:
                pytest.fail("a turn must not end by what it reads")
        for step in range(30, 60):  # what was hit while it was current is given up; what comes next is persisted
            job.step(step, persist=True)
            daemon.turn()
        turn_until(daemon, lambda: any(step >= 30 for step in steps(job)), "a commit after the damage")
    for step in steps(job):
        assert_bitwise(job, (1, step))


def test_a_record_of_the_right_frame_and_the_wrong_fields_is_damaged(job: FakeJob) -> None:
    path = job.directory.path / "generation.msgpack"
    body = msgpack.unpackb(path.read_bytes()[24:])
    for change in ({"generation": "1"}, {"parent": [1]}, {"parent": 7}, {"claimed": 1}, {"token": None}):
        packed = msgpack.packb(body | change)
        path.write_bytes(struct.pack("<8sHHIQ", b"FCKRECRD", 1, 0, 0, digest(packed)) + packed)
        with pytest.raises(DamagedError, match="schema"):
            job.directory.read_generation()
