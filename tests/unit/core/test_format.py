"""Golden files of format version 1: what was written once is read for ever, and written the same way.

A change that breaks one of these needs a new version and a new folder; the old files stay and stay readable.
`python tests/unit/core/test_format.py FOLDER` writes the files of the present version.
"""

from __future__ import annotations

import os
import re
import struct
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from support.memory import request_of
from support.paths import ROOT, TESTS

from flashckpt.checkpoint.intents import decode_intent, decode_proposal, encode_intent, encode_proposal
from flashckpt.checkpoint.retention import decode_lease, encode_lease
from flashckpt.checkpoint.root_records import decode_claim, encode_claim
from flashckpt.core import superblock
from flashckpt.core.intent import Intent, NodeProposal
from flashckpt.core.lineage import Generation
from flashckpt.core.manifest import Manifest, ShardTable, cover, decode_manifest, encode_manifest, header_of, merge
from flashckpt.core.outline import encode_outline, outline_of
from flashckpt.core.records import chunk_digests, digest, mark_of
from flashckpt.core.schema import HEAD_BYTES, TensorFigures, decode_manifest_header
from flashckpt.core.shard import Shard, place
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.core.spread import IndexEntry, Spread, decode_spread, encode_spread
from flashckpt.core.superblock import SegmentSpec, SlotHeader, SlotState, Superblock
from flashckpt.core.values import concatenate, cut
from flashckpt.errors import DamagedError, DisagreementError, FormatVersionError
from flashckpt.shm import control, segment_file
from flashckpt.shm.acks import GroupAcks, decode_group, encode_group
from flashckpt.shm.control import Control, RankAcks
from flashckpt.shm.job_directory import DaemonStatus, JobConfig, JobDirectory
from flashckpt.shm.segment import Segment

V1 = TESTS / "format" / "v1"
V1_1 = V1.with_name("v1.1")
"""MANIFEST with a summary; everything else is as in 1.0."""
V1_2 = V1.with_name("v1.2")
"""Records of the root are sealed; everything else is as in 1.1."""
V1_3 = V1.with_name("v1.3")
"""MANIFESTs that name indexes, and outlines in these; everything else is as in 1.2."""

HEADERS = [
    SlotHeader(sequence=9, generation=3, step=120, state=SlotState.COMPLETE, world_size=2, rank=1, persist=True,
               parent=SnapshotId(2, 100), manifest_bytes=777, manifest_digest=0x1122334455667788, data_bytes=4096),
    SlotHeader(sequence=2**63, generation=1, step=0, state=SlotState.WRITING, world_size=1, rank=0),
    SlotHeader(),
]  # fmt: skip
BLOCK = Superblock(
    spec=SegmentSpec(job="run-Ω", root_digest=2**64 - 2, rank=1, slots=2, manifest_capacity=4096,
                     data_capacity=4096, layout_hash=0xABCDEF0123456789),
    uid=1000, boot_id=bytes(range(16)), created_ns=1_790_000_000_123_456_789,
)  # fmt: skip
CONFIG = JobConfig(job="j", root="s3://b/r", storage_options={"endpoint": "x", "n": 1}, keep_every=100, world_size=8)
RECORD = Generation(number=3, token="t0k", parent=SnapshotId(2, 40), world_size=8, claimed=True)
CLAIM = Generation(number=3, token="t0k", parent=SnapshotId(2, 100), world_size=8, created_s=1_790_000_000.125)
FIRST_CLAIM = Generation(number=1, token="t0k", world_size=0)
INTENT = Intent(generation=3, step=120, writers=(0, 1, 2, 3), leader="node0 pid 1234", created_s=1_790_000_000.125)
READY = NodeProposal(
    ranks=(2, 3),
    world_size=4,
    pinned=SnapshotId(3, 120),
    at_least=SnapshotId(3, 120),
    complete=(SnapshotId(3, 100), SnapshotId(3, 120)),
    urgent=True,
)
LEASE_S = 1_790_000_000.125
GROUP = GroupAcks(
    is_whole=True,
    common=(SnapshotId(3, 120), SnapshotId(2, 100)),
    lacked=(SnapshotId(3, 125),),
    open=(SnapshotId(3, 130),),
    low_watermark=SnapshotId(3, 130),
    listed_above=SnapshotId(2, 90),
)
STATUS = DaemonStatus(committed=SnapshotId(3, 60), failures=2, error="disk full", lag=1, pid=7, updated_ns=5)


def data_of(rank: int) -> list[np.ndarray]:
    return [np.arange(8, dtype="<f4").reshape(4, 2) + rank, np.array(7, "<i8"), np.zeros((0, 3), np.uint8)]


def manifest(rank: int, *, objects: tuple[str, ...] = ()) -> Manifest:
    shards = [
        Shard(fqn="w", dtype="float32", global_shape=(8, 2), offsets=(4 * rank, 0), lengths=(4, 2)),
        Shard(fqn="step", dtype="int64", global_shape=(), offsets=(), lengths=(), replica=rank),
        Shard(fqn="empty", dtype="bool", global_shape=(0, 3), offsets=(0, 0), lengths=(0, 3)),
    ]
    return Manifest(
        job="run-Ω", generation=3, step=120, parent=SnapshotId(2, 100), world_size=2, rank=rank, writers=[0, 1],
        coordinates={"dp": rank, "tp": 0}, table=ShardTable.from_shards(shards, place(shards).offsets),
        digests=np.concatenate([chunk_digests(np.ascontiguousarray(d)) for d in data_of(rank)]),
        values={"lr": 0.1, "betas": (0.9, 0.95), "big": 2**100, "none": None, f"rng@rank{rank}": b"\x00\xff"},
        objects=list(objects),
    )  # fmt: skip


def merged() -> Manifest:
    return merge([manifest(0, objects=("r00000.p0.fck",)), manifest(1, objects=("r00001.p0.fck",))])


def pieces() -> dict[str, bytes]:
    """Every small structure of the memory tier as its bytes; the key is the file name."""
    return {
        "superblock": superblock.encode_superblock(BLOCK),
        "owner": superblock.encode_owner(4711, 123_456_789),
        "slot-manifest": encode_manifest(manifest(1)),
        "merged-manifest": encode_manifest(merged()),
        "published": control.encode_acks(RankAcks.of([SnapshotId(3, 120), SnapshotId(2, 100)], SnapshotId(3, 125))),
        **{f"header-{i}": superblock.encode_header(header) for i, header in enumerate(HEADERS)},
        **root_records(),
    }


def root_records() -> dict[str, bytes]:
    """Every record of a root as its bytes."""
    return {
        "claim": encode_claim(CLAIM),
        "first-claim": encode_claim(FIRST_CLAIM),
        "intent": encode_intent(INTENT),
        "ready": encode_proposal(READY),
        "lease": encode_lease(LEASE_S),
    }


def read_root_record(name: str, raw: bytes) -> object:
    if name == "lease":
        return decode_lease(raw, "leases/x/y")
    readers: dict[str, tuple[Any, str]] = {
        "claim": (decode_claim, "generations/000003"),
        "first-claim": (decode_claim, "generations/000001"),
        "intent": (decode_intent, "intents/000003-000000120"),
        "ready": (decode_proposal, "intents/ready-000003/r00002"),
    }
    decode, key = readers[name]
    found: object = decode(raw, key, "/root")
    return found


@pytest.mark.parametrize("name", pieces())
def test_the_bytes_of_version_1_are_written_as_they_always_were(name: str) -> None:
    newest = next(folder for folder in (V1_2, V1_1, V1) if (folder / name).exists())
    assert pieces()[name] == (newest / name).read_bytes()


@pytest.mark.parametrize("folder", [V1, V1_2], ids=lambda folder: folder.name)
@pytest.mark.parametrize("name", root_records())
def test_records_of_a_root_of_every_version_are_read(folder: Path, name: str) -> None:
    expected = {"claim": CLAIM, "first-claim": FIRST_CLAIM, "intent": INTENT, "ready": READY, "lease": LEASE_S}
    assert read_root_record(name, (folder / name).read_bytes()) == expected[name]


@pytest.mark.parametrize("name", root_records())
def test_every_flipped_bit_of_a_record_of_a_root_is_found(name: str) -> None:
    raw = (V1_2 / name).read_bytes()
    for bit in range(8 * len(raw)):
        bad = bytearray(raw)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedError if name != "lease" else (DamagedError, ValueError)) as caught:
            read_root_record(name, bytes(bad))
        assert name == "lease" or getattr(caught.value, "remedy", False)
    for end in range(len(raw)):
        with pytest.raises((DamagedError, ValueError)):
            read_root_record(name, raw[:end])


@pytest.mark.parametrize("name", ["claim", "intent"])
def test_a_record_of_a_newer_major_is_named_as_such_and_one_under_another_name_is_damaged(name: str) -> None:
    raw = (V1_2 / name).read_bytes()
    prefix = raw[:8] + b"\2\0" + raw[10:16]
    newer = prefix + struct.pack("<Q", digest(prefix + raw[24:])) + raw[24:]
    with pytest.raises(FormatVersionError, match=r"2\.2"):
        read_root_record(name, newer)
    with pytest.raises(DamagedError):
        decode_claim((V1_2 / "claim").read_bytes(), "generations/000004", "/root")
    with pytest.raises(DamagedError):
        decode_intent((V1_2 / "intent").read_bytes(), "intents/000003-000000121", "/root")


def test_manifest_of_version_1_1_is_that_of_1_0_with_a_summary_in_front() -> None:
    old, new = ((folder / "merged-manifest").read_bytes() for folder in (V1, V1_1))
    assert (old[8:12], new[8:12]) == (bytes([1, 0, 0, 0]), bytes([1, 0, 1, 0]))
    assert decode_manifest_header(old, len(old)) is None
    assert decode_manifest_header(new[:HEAD_BYTES], len(new)) == header_of(decode_manifest(old))
    body = msgpack.unpackb(new[32:])
    assert next(iter(body)) == "summary"
    del body["summary"]
    assert msgpack.packb(body) == old[32:], "a reader of 1.0 ignores the key"


def with_ranges() -> dict[str, bytes]:
    """An index of two ranks, the MANIFEST of it, and the object that holds what only one rank asks for."""
    parts, blobs, at = [], [], 0
    for rank in range(2):
        values, ranges, blob = cut(manifest(rank).values, at)
        parts.append((replace(manifest(rank, objects=(f"r{rank:05d}.p0.fck",)), values=values), ranges))
        blobs.append(blob)
        at += len(blob)
    first = parts[0][0]
    first = replace(
        first, objects=[*first.objects, "r00000-00001.values.fck"], ranged=concatenate((r, 1) for _, r in parts)
    )
    index = cover([first, parts[1][0]])
    return {
        "index-of-ranks": encode_manifest(index),
        "merged-with-ranges": encode_manifest(merge([index])),
        "values-of-ranks": b"".join(blobs),
    }


@pytest.mark.parametrize("name", with_ranges())
def test_manifests_with_ranges_are_written_as_they_always_were(name: str) -> None:
    assert with_ranges()[name] == (V1_2 / name).read_bytes()


def test_manifests_with_ranges_are_read() -> None:
    index, whole = (decode_manifest((V1_2 / n).read_bytes()) for n in ("index-of-ranks", "merged-with-ranges"))
    blob = (V1_2 / "values-of-ranks").read_bytes()
    assert (index.rank, index.covers, index.writers) == (0, (0, 1), [0, 1])
    assert (whole.rank, whole.covers, whole.objects) == (-1, (), index.objects)
    assert {key: value for key, value in whole.values.items() if key.startswith("rng")} == {}
    for entry, rank in enumerate(range(2)):
        number, offset, nbytes = whole.ranged.range(entry)
        assert whole.objects[number] == "r00000-00001.values.fck"
        assert whole.ranged.value(entry, blob[offset : offset + nbytes]) == (f"rng@rank{rank}", b"\x00\xff")
    raw = (V1_2 / "merged-with-ranges").read_bytes()
    assert raw[8:12] == bytes([2, 0, 1, 0]), "a program before 1.2 refuses it instead of restoring without its values"
    assert decode_manifest_header(raw[:HEAD_BYTES], len(raw)) == header_of(whole)


def with_outlines() -> dict[str, bytes]:
    """An index of two ranks as a large job has it, and the MANIFEST that names it."""
    first, second = manifest(0, objects=("r00000.p0.fck",)), manifest(1, objects=("r00001.p0.fck",))
    second = replace(second, table=second.table.take(np.array([0, 2])), digests=second.digests[:1])
    parts, blobs, at = [], [], 0
    for one in (first, second):
        values, ranges, blob = cut(one.values, at)
        parts.append((replace(one, values=values), ranges))
        blobs.append(blob)
        at += len(blob)
    ranged = concatenate((ranges, 1) for _, ranges in parts)
    whole = replace(parts[0][0], objects=[*first.objects, "r00000-00001.values.fck"], ranged=ranged)
    outline = replace(outline_of([(0, first.table), (1, second.table)]), suspects=["w"], by_design=["step"])
    index = replace(cover([whole, parts[1][0]]), outline=msgpack.packb(encode_outline(outline)), needs=(104, at, 32))
    head = replace(index, rank=-1, covers=(), coordinates={}, digests=index.digests[:0], objects=[whole.objects[1]],
                   table=ShardTable.from_shards([], []), ranged=concatenate((ranges, 0) for _, ranges in parts))  # fmt: skip
    spread = Spread(head=head, outline=outline, indexes=[IndexEntry.of(index)])
    return {"index-with-outline": encode_manifest(index), "manifest-of-indexes": encode_spread(spread)}


@pytest.mark.parametrize("name", with_outlines())
def test_manifests_that_name_indexes_are_written_as_they_always_were(name: str) -> None:
    assert with_outlines()[name] == (V1_3 / name).read_bytes()


def test_manifests_that_name_indexes_are_read_and_refused_by_earlier_releases() -> None:
    index, raw = (
        decode_manifest((V1_3 / "index-with-outline").read_bytes()),
        (V1_3 / "manifest-of-indexes").read_bytes(),
    )
    spread = decode_spread(raw)
    assert (index.covers, len(index.table), index.needs) == ((0, 1), 4, (104, 30, 32))
    assert spread.indexes == [IndexEntry.of(index)]
    assert (spread.head.values, spread.head.objects) == (index.values, ["r00000-00001.values.fck"])
    assert spread.head.ranged.keys == ["rng@rank0", "rng@rank1"]
    assert (spread.outline.fqns, spread.outline.suspects, spread.outline.by_design) == (
        ["w", "step", "empty"],
        ["w"],
        ["step"],
    )
    assert decode_manifest_header(raw[:HEAD_BYTES], len(raw)) == spread.header
    assert (spread.header.nbytes, spread.header.suspects) == (72, 1)
    assert raw[8:12] == bytes([3, 0, 0, 0])
    with pytest.raises(FormatVersionError, match="use the flashckpt release that wrote it, or a newer one"):
        decode_manifest(raw)
    body = msgpack.unpackb((V1_3 / "index-with-outline").read_bytes()[32:], strict_map_key=False)
    assert (
        msgpack.packb({k: v for k, v in body.items() if k not in ("outline", "needs")})
        == encode_manifest(replace(index, outline=b""))[32:]
    ), "a reader of 1.2 reads the index, and ignores the keys"


def with_figures() -> dict[str, bytes]:
    """A slot in which a tensor became NaN: its header, its manifest, and the MANIFEST of it and of one without figures."""
    noted = TensorFigures(
        np.array([np.inf, -1, 0], np.float32), np.array([np.nan, 0, 0], np.float32), np.array([True, False, False])
    )
    first = replace(manifest(0, objects=("r00000.p0.fck",)), figures=noted)
    return {
        "suspect-header": superblock.encode_header(replace(HEADERS[0], suspect=True)),
        "slot-with-figures": encode_manifest(replace(manifest(1), figures=noted)),
        "merged-with-figures": encode_manifest(merge([first, manifest(1, objects=("r00001.p0.fck",))])),
    }


@pytest.mark.parametrize("name", with_figures())
def test_figures_are_written_as_they_always_were(name: str) -> None:
    assert with_figures()[name] == (V1_2 / name).read_bytes()


def test_figures_are_read_and_a_reader_without_them_ignores_them() -> None:
    slot, whole = (decode_manifest((V1_2 / n).read_bytes()) for n in ("slot-with-figures", "merged-with-figures"))
    assert (slot.suspects, whole.suspects) == (["w"], ["w"])
    assert whole.figures is not None
    assert whole.figures.largest.tolist() == [np.inf, -1, 0, -1]
    header = superblock.decode_header((V1_2 / "suspect-header").read_bytes())
    assert header == replace(HEADERS[0], suspect=True)
    body = msgpack.unpackb((V1_2 / "slot-with-figures").read_bytes()[32:], strict_map_key=False)
    del body["figures"]
    assert msgpack.packb(body) == (V1 / "slot-manifest").read_bytes()[32:], "every other byte is as before"
    raw = (V1_2 / "merged-with-figures").read_bytes()
    assert raw[8:12] == (V1_1 / "merged-manifest").read_bytes()[8:12]
    assert decode_manifest_header(raw[:HEAD_BYTES], len(raw)) == header_of(whole)
    assert header_of(whole).suspects == 1


def with_token() -> dict[str, bytes]:
    """A slot that says of which of the generations with its number it is: its header, its manifest."""
    return {
        "marked-header": superblock.encode_header(replace(HEADERS[0], mark=mark_of("t0k"))),
        "slot-with-token": encode_manifest(replace(manifest(1), token="t0k")),
    }


@pytest.mark.parametrize("name", with_token())
def test_tokens_are_written_as_they_always_were(name: str) -> None:
    assert with_token()[name] == (V1_3 / name).read_bytes()


def test_tokens_are_read_and_manifests_of_different_ones_do_not_make_one_checkpoint() -> None:
    assert superblock.decode_header((V1_3 / "marked-header").read_bytes()) == replace(HEADERS[0], mark=mark_of("t0k"))
    slot = decode_manifest((V1_3 / "slot-with-token").read_bytes())
    assert (slot.token, decode_manifest((V1 / "slot-manifest").read_bytes()).token) == ("t0k", "")
    first = replace(manifest(0, objects=("r00000.p0.fck",)), token="t0k")
    second = manifest(1, objects=("r00001.p0.fck",))
    assert merge([first, replace(second, token="t0k")]).token == "t0k"
    with pytest.raises(DisagreementError, match="different snapshots"):
        merge([first, replace(second, token="other")])


def test_any_flipped_bit_of_a_summary_is_found_and_a_wrong_size_too() -> None:
    raw = (V1_1 / "merged-manifest").read_bytes()
    start, nbytes = 43, raw[42]  # behind frame, map header, key and bin header
    for bit in range(8 * start, 8 * (start + nbytes)):
        bad = bytearray(raw)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedError):
            decode_manifest_header(bad[:HEAD_BYTES], len(raw))
    for size in (len(raw) - 1, len(raw) + 1):
        with pytest.raises(DamagedError, match="a manifest is damaged"):
            decode_manifest_header(raw[:HEAD_BYTES], size)


def test_version_1_is_read() -> None:
    raw = {name: (V1 / name).read_bytes() for name in pieces()}
    assert superblock.decode_superblock(raw["superblock"], path="x") == BLOCK
    assert superblock.decode_owner(raw["owner"]) == 4711
    assert [superblock.decode_header(raw[f"header-{i}"]) for i in range(3)] == HEADERS
    assert control.decode_acks(raw["published"]) == RankAcks(
        complete=(SnapshotId(3, 120), SnapshotId(2, 100)), low_watermark=SnapshotId(3, 125)
    )
    one, both = decode_manifest(raw["slot-manifest"]), decode_manifest(raw["merged-manifest"])
    assert (one.identity, one.parent, one.rank, one.coordinates) == ((3, 120), (2, 100), 1, {"dp": 1, "tp": 0})
    assert one.values == manifest(1).values
    assert one.values["betas"] == (0.9, 0.95)
    assert [one.table.shard(i) for i in range(3)] == [manifest(1).table.shard(i) for i in range(3)]
    assert one.digests.tolist() == manifest(1).digests.tolist()
    assert (both.rank, both.objects, both.table.object_id.tolist()) == (-1, merged().objects, [0, 0, 0, 1])


def whole_segment(path: Path) -> None:
    segment = Segment.create(path, BLOCK.spec)
    writer = segment.begin(1, request_of(3, 120, world_size=2, parent=SnapshotId(2, 100), persist=True))
    m = manifest(1)
    for row, data in enumerate(data_of(1)):
        at = int(m.table.byte_offset[row])
        writer.data[at : at + data.nbytes] = data.tobytes()
    writer.commit(encode_manifest(m))
    segment.begin(0, request_of(3, 125, world_size=2, parent=SnapshotId(2, 100)))
    segment.close()


def test_a_whole_segment_of_version_1_is_attached_and_read(shm_dir: Path) -> None:
    path = shm_dir / "r00001.seg"
    raw = (V1 / "segment").read_bytes()
    block = superblock.decode_superblock(raw, path=str(path))
    here = replace(block, uid=os.getuid(), boot_id=segment_file.boot_id())  # else it is refused, as it must be
    path.write_bytes(superblock.encode_superblock(here) + raw[2048:])
    segment = Segment.attach(path)
    assert [h.state for h in segment.headers()] == [SlotState.WRITING, SlotState.COMPLETE]
    assert segment.pin(0) is None
    pin = segment.pin(1)
    assert pin is not None
    with pin:
        m = pin.manifest()
        for row, data in enumerate(data_of(1)):
            at = int(m.table.byte_offset[row])
            assert bytes(pin.data[at : at + data.nbytes]) == data.tobytes()
    segment.close()


def test_control_and_record_files_of_version_1_are_read(shm_dir: Path) -> None:
    directory = JobDirectory.open("j")
    for name in ("job.msgpack", "generation.msgpack", "daemon.msgpack", "control"):
        (directory.path / name).write_bytes((V1 / name).read_bytes())
    assert directory.read_config() == CONFIG
    assert directory.read_generation() == RECORD
    assert directory.read_status() == STATUS
    mapped = Control.open(directory.control_path)
    assert (mapped.rows, mapped.stop_after) == (2, 130)
    row = mapped.row(1)
    assert (row.rank, row.generation, row.step, row.complete) == (5, 3, 120, [(3, 120), (2, 100)])


def test_a_record_of_a_newer_minor_version_is_read_without_its_new_keys() -> None:
    directory = JobDirectory.open("j")
    directory.write_generation(RECORD)
    path = directory.path / "generation.msgpack"
    body = msgpack.unpackb(path.read_bytes()[24:]) | {"new_in_1_9": 1}
    packed = msgpack.packb(body)
    for minor in (1, 9):
        for major in (1, 2):
            prefix = struct.pack("<8sHHI", b"FCKRECRD", major, minor, 0)
            path.write_bytes(prefix + struct.pack("<Q", digest(prefix + packed if minor == 9 else packed)) + packed)
            if major == 1:
                assert directory.read_generation() == RECORD
            else:
                with pytest.raises(FormatVersionError):
                    directory.read_generation()


def test_the_byte_tables_of_the_documentation_have_no_gaps_and_fit_the_code() -> None:
    text = (ROOT / "docs" / "format.md").read_text()
    ends = []
    for table in text.split("| offset | bytes | what |\n|---|---|---|\n")[1:]:
        rows = [line.split("|")[1:3] for line in table.split("\n\n")[0].splitlines() if line.startswith("|")]
        cursor = int(rows[0][0])
        for offset, size in rows:
            assert int(offset) == cursor, f"gap at {offset}"
            cursor += int(size)
        ends.append(cursor)
    assert ends == [
        2048,
        24,
        superblock.HEADER_BYTES,
        32,
        control.PAGE,
        128 + 24 + 16 * (1 + control.MAX_COMPLETE),
        24,
        40,
    ]


@pytest.mark.parametrize("page", ["format.md"])
def test_every_test_that_the_documentation_names_exists(page: str) -> None:
    folder = V1.parents[1]
    text = (folder.parent / "docs" / page).read_text()
    files = {path.name: path.read_text() for path in folder.rglob("*.py")}
    sources = "".join(files.values())
    named = set(re.findall(r"\btest_\w+", text))
    assert len(named) > 10
    for name in named:
        assert f"{name}.py" in files or f"def {name}(" in sources, name


def test_the_record_of_what_a_group_of_ranks_has_acknowledged_is_written_and_read() -> None:
    raw = (V1_2 / "group-acks").read_bytes()
    assert encode_group(GROUP) == raw
    assert decode_group(raw) == GROUP


def write_all(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, raw in pieces().items():
        (folder / name).write_bytes(raw)
    whole_segment(folder / "segment")
    directory = JobDirectory(folder)
    directory.write_config(CONFIG)
    directory.write_generation(RECORD)
    directory.write_status(STATUS)
    mapped = Control.open(directory.control_path, rows=2)
    mapped.stop_after = 130
    row = mapped.row(1)
    row.clear()
    row.rank, row.generation, row.step = 5, 3, 120
    row.complete = [SnapshotId(3, 120), SnapshotId(2, 100)]


if __name__ == "__main__":
    write_all(Path(sys.argv[1]))
