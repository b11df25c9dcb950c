"""Every decoder of ours, and of foreign files, as a target of tests/support/fuzzing.py."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import struct
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import torch
from torch.distributed import checkpoint as torch_dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from flashckpt.checkpoint.catalog import list_checkpoints
from flashckpt.checkpoint.compression import Codec, Frame, PackedObjects, compressed_parts
from flashckpt.checkpoint.intents import decode_intent, decode_proposal, encode_intent, encode_proposal
from flashckpt.checkpoint.merging import refuse_gaps
from flashckpt.checkpoint.retention import encode_lease, leased_prefixes
from flashckpt.checkpoint.root_records import decode_claim, encode_claim
from flashckpt.core import superblock
from flashckpt.core.intent import Intent, NodeProposal
from flashckpt.core.lineage import Generation
from flashckpt.core.manifest import Manifest, ShardTable, cover, decode_manifest, encode_manifest, header_of, merge
from flashckpt.core.outline import outline_of
from flashckpt.core.records import chunk_digests, digest, seal
from flashckpt.core.schema import HEAD_BYTES, decode_manifest_header, encode_manifest_header
from flashckpt.core.shard import Shard, place
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.core.spread import IndexEntry, Spread, decode_spread, encode_spread
from flashckpt.core.superblock import SlotHeader, SlotState
from flashckpt.core.values import concatenate, cut
from flashckpt.daemon.persister.agreement import choose_proposal
from flashckpt.daemon.zygote import messages
from flashckpt.errors import DamagedError
from flashckpt.interop.incoming import detect, open_foreign
from flashckpt.interop.selection import Selection
from flashckpt.planning.packs import index_manifest, plan_packs
from flashckpt.planning.peer_index import encode_held_rows
from flashckpt.sampler.datasets import index_file
from flashckpt.sampler.order.state import SamplerState
from flashckpt.shm import acks, segment_file
from flashckpt.shm.acks import encode_group, job_acks, node_acks
from flashckpt.shm.control import Control, RankAcks
from flashckpt.shm.job_directory import DaemonStatus, JobConfig, JobDirectory
from flashckpt.shm.segment import Segment
from flashckpt.storage.posix import PosixStore
from support.fuzzing import Target
from support.memory import request_of

VALUES: dict[str, Any] = {
    "lr": 0.1, "betas": (0.9, (1, "x")), "big": 2**100, "none": None, "groups": [{"a": 1, 3: True}], "rng@rank0": b"\0\xff",
    "aliases": {"tied": "w"},
}  # fmt: skip


def manifest(rank: int, objects: tuple[str, ...] = ()) -> Manifest:
    shards = [
        Shard(fqn="w", dtype="float32", global_shape=(8, 2), offsets=(4 * rank, 0), lengths=(4, 2)),
        Shard(fqn="step", dtype="int64", global_shape=(), offsets=(), lengths=()),
        Shard(fqn="empty", dtype="bool", global_shape=(0, 3), offsets=(0, 0), lengths=(0, 3)),
    ]
    data = [np.arange(8, dtype="<f4"), np.array([7], "<i8"), np.zeros(0, np.uint8)]
    return Manifest(
        job="run", generation=3, step=120, parent=SnapshotId(2, 100), world_size=2, rank=rank, writers=[rank],
        coordinates={"dp": rank}, table=ShardTable.from_shards(shards, place(shards).offsets),
        digests=np.concatenate([chunk_digests(one) for one in data]), values=VALUES, objects=list(objects),
    )  # fmt: skip


def merged() -> Manifest:
    return merge([manifest(0, ("r00000.p0.fck",)), manifest(1, ("r00001.p0.fck",))])


def ranged() -> Manifest:
    """The index of two ranks, their generators' state in a range of another object."""
    values = {f"rng@pp{rank}": bytes([rank]) for rank in range(2)}
    _, ranges, _ = cut(values, 0)
    first = replace(manifest(0, ("r00000.p0.fck", "r00000-00001.values.fck")), ranged=concatenate([(ranges, 1)]))
    return cover([first, manifest(1, ("r00001.p0.fck",))])


# -- manifests -------------------------------------------------------------------------------------------


def sealed_manifest(raw: bytes) -> bytes:
    prefix, body = raw[:16].ljust(16, b"\0"), raw[32:]
    prefix += struct.pack("<Q", len(body))
    return prefix + struct.pack("<Q", digest(prefix + body)) + body


def manifest_tree(raw: bytes) -> dict[str, Any]:
    body = msgpack.unpackb(raw[32:])
    summary = body.pop("summary", None)
    if summary is not None:
        body["summary"] = msgpack.unpackb(summary[8:])
    nested = {"table": msgpack.unpackb(body["table"]), "values": msgpack.unpackb(body["values"], strict_map_key=False)}
    return {**body, **nested}


def manifest_bytes(tree: Any) -> bytes:
    if isinstance(tree, dict):
        tree = dict(tree)
        for name in ("table", "values"):
            if isinstance(tree.get(name), dict):
                tree[name] = msgpack.packb(tree[name])
        if isinstance(tree.get("summary"), dict):
            packed = msgpack.packb(tree.pop("summary"))
            tree = {"summary": struct.pack("<Q", digest(packed)) + packed, **tree}
    return sealed_manifest(b"FCKMANIF\1\0\1\0".ljust(32, b"\0") + msgpack.packb(tree))


def use_manifest(raw: bytes) -> None:
    m = decode_manifest(raw)
    shards = [m.table.shard(row) for row in range(len(m.table))]
    assert [shard.nbytes for shard in shards] == m.table.nbytes.tolist()
    assert all(m.table.rows(shard.fqn) for shard in shards)
    header_of(m)
    again = encode_manifest(m)
    decode_manifest(again)
    merge([m, m])
    for entry in range(len(m.ranged)):
        number, offset, nbytes = m.ranged.range(entry)
        assert m.objects[number]
        assert offset >= 0
        with contextlib.suppress(DamagedError):
            m.ranged.value(entry, bytes(min(nbytes, 1 << 20)))
    encode_held_rows(m, 0)
    if m.rank < 0:
        refuse_gaps(m.table)
    elif not m.objects:
        packs = plan_packs(m.table, 1 << 62)
        index_manifest(m, packs, [f"p{n}" for n in range(len(packs))])


def spread() -> bytes:
    """A MANIFEST that names the index of two ranks, where the boxes of these tile each tensor."""
    held = ranged()
    parts = [manifest(0), replace(manifest(1), table=manifest(1).table.take(np.array([0, 2])))]
    outline = replace(outline_of([(one.rank, one.table) for one in parts]), suspects=["w"], by_design=[])
    head = replace(
        held, rank=-1, covers=(), coordinates={}, table=ShardTable.from_shards([], []), digests=held.digests[:0]
    )
    return encode_spread(Spread(head=head, outline=outline, indexes=[IndexEntry.of(held)]))


def spread_tree(raw: bytes) -> dict[str, Any]:
    body = msgpack.unpackb(raw[32:])
    outline = msgpack.unpackb(body["outline"])
    outline["patterns"] = [[number, msgpack.unpackb(one)] for number, one in outline["patterns"]]
    return {**body, "outline": outline}


def spread_bytes(tree: Any) -> bytes:
    if isinstance(tree, dict) and isinstance(tree.get("outline"), dict):
        outline = dict(tree["outline"])
        if isinstance(found := outline.get("patterns"), list):
            outline["patterns"] = [
                [one[0], msgpack.packb(one[1])] if isinstance(one, list) and len(one) == 2 else one for one in found
            ]
        tree = {**tree, "outline": msgpack.packb(outline)}
    return sealed_manifest(b"FCKMANIF\3\0\0\0".ljust(32, b"\0") + msgpack.packb(tree))


def use_spread(raw: bytes) -> None:
    found = decode_spread(raw)
    encode_manifest_header(found.header)
    named = found.outline.without_boxes(found.outline.kinds)
    assert [named.shard(row).fqn for row in range(len(named))] == list(found.outline.kinds)
    wanted = ShardTable.stacked([named, manifest(0).table])
    assert set(found.near(wanted)) <= set(found.indexes)
    assert decode_spread(encode_spread(found)).identity == found.identity


def use_summary(raw: bytes) -> None:
    summary = decode_manifest_header(raw[:HEAD_BYTES], len(raw))
    if summary is not None:
        encode_manifest_header(summary)


def _root_with(folder: Path) -> tuple[PosixStore, Path]:
    path = folder / "root" / "step-000000120.g3" / "MANIFEST"
    path.parent.mkdir(parents=True, exist_ok=True)
    return PosixStore(folder / "root"), path


def catalogue(folder: Path) -> Target:
    store, path = _root_with(folder)

    def decode(raw: bytes) -> None:
        path.write_bytes(raw)
        found = list_checkpoints(store, damaged=True)
        assert all(isinstance(info.step, int) for info in found)
        if not found or found[0].problem:
            raise DamagedError("no checkpoint")

    seeds = [encode_manifest(merged())]
    return Target(seeds=seeds, decode=decode, reseal=sealed_manifest, tree=(manifest_tree, manifest_bytes))


# -- memory ----------------------------------------------------------------------------------------------

HEADER = SlotHeader(
    sequence=9, generation=3, step=120, state=SlotState.COMPLETE, world_size=2, rank=1, parent=SnapshotId(2, 1)
)
SPEC = superblock.SegmentSpec(
    job="run", root_digest=1, rank=1, slots=2, manifest_capacity=4096, data_capacity=4096, layout_hash=2
)


def sealed_header(raw: bytes) -> bytes:
    fields = raw[: superblock.HEADER_BYTES - 8].ljust(superblock.HEADER_BYTES - 8, b"\0")
    return fields + struct.pack("<Q", digest(fields))


def use_header(raw: bytes) -> None:
    header, copy = superblock.newest_copy(raw.ljust(4096, b"\0"))
    assert copy in (0, 1)
    assert header.state in SlotState
    acks.choose_slot([header, HEADER], pinned=(), common=[SnapshotId(3, 121)])


def superblock_bytes() -> bytes:
    block = superblock.Superblock(spec=SPEC, uid=os.getuid(), boot_id=segment_file.boot_id(), created_ns=1)
    return superblock.encode_superblock(block)


def sealed_superblock(raw: bytes) -> bytes:
    head = raw[:2040].ljust(2040, b"\0")
    return head + struct.pack("<Q", digest(head)) + raw[2048:]


def segment(folder: Path) -> Target:
    """A whole segment with one COMPLETE slot: superblock, headers and manifest area damaged, then read as a daemon does."""
    path = folder / "r00001.seg"
    made = Segment.create(path, SPEC)
    m = manifest(1)
    writer = made.begin(0, request_of(3, 120, world_size=2, parent=SnapshotId(2, 100), persist=True))
    writer.commit(encode_manifest(m), data_bytes=4096)
    made.close()
    good = path.read_bytes()

    def reseal(raw: bytes) -> bytes:
        raw = sealed_superblock(raw.ljust(len(good), b"\0")[: len(good)])
        pages = [raw[at : at + 88] + struct.pack("<Q", digest(raw[at : at + 88])) for at in (4096, 6144)]
        return raw[:4096] + pages[0] + raw[4192:6144] + pages[1] + raw[6240:]

    def decode(raw: bytes) -> None:
        path.write_bytes(raw)
        attached = Segment.attach(path)
        try:
            for number in range(attached.spec.slots):
                if (pin := attached.pin(number)) is not None:
                    with pin:
                        pin.manifest()
                        bytes(pin.data)
        finally:
            attached.close()

    return Target(seeds=[good[:8192] + good[8192:]], decode=decode, reseal=reseal)


def control(folder: Path) -> Target:
    path = folder / "control"
    mapped = Control.open(path, rows=2)
    row = mapped.row(1)
    row.clear()
    row.rank, row.generation, row.step = 1, 3, 120
    published = RankAcks.of([SnapshotId(3, 120), SnapshotId(3, 100)], SnapshotId(3, 125))
    row.publish(published)
    mapped.publish_job_acks(3, encode_group(node_acks([published, None])))
    mapped.close()

    def decode(raw: bytes) -> None:
        path.write_bytes(raw)
        again = Control.open(path)
        try:
            assert isinstance(again.stop_after, int)
            job_acks(again, 3)
            for index in range(again.rows):
                known = again.row(index).published
                assert known is None or known.lacks(SnapshotId(3, 125)) in (True, False)
        finally:
            again.close()

    return Target(seeds=[path.read_bytes()], decode=decode)


# -- records ---------------------------------------------------------------------------------------------


def record_tree(raw: bytes) -> Any:
    return msgpack.unpackb(raw[24:])


def resealed_record(minor: int) -> Callable[[bytes], bytes]:
    def reseal(raw: bytes) -> bytes:
        prefix, body = struct.pack("<8sHHI", b"FCKRECRD", 1, minor, 0), raw[24:]
        return prefix + struct.pack("<Q", digest(prefix + body if minor >= 2 else body)) + body

    return reseal


def record(seeds: Iterable[bytes], decode: Callable[[bytes], object]) -> Target:
    return Target(seeds=list(seeds), decode=decode, reseal=resealed_record(2), tree=(record_tree, seal))


def job_record(folder: Path, name: str, value: Any) -> Target:
    directory = JobDirectory(folder)
    write, read = {"job": ("write_config", "read_config"), "generation": ("write_generation", "read_generation"),
                   "daemon": ("write_status", "read_status")}[name]  # fmt: skip
    getattr(directory, write)(value)
    path = folder / f"{name}.msgpack"

    def decode(raw: bytes) -> None:
        path.write_bytes(raw)
        found: Any = getattr(directory, read)()
        assert type(found) is type(value)
        replace(found)

    tree = (record_tree, lambda fields: seal(fields, minor=0))
    return Target(seeds=[path.read_bytes()], decode=decode, reseal=resealed_record(0), tree=tree)


def lease(folder: Path) -> Target:
    store = PosixStore(folder / "leases-root")
    key = "leases/step-000000120.g3/0123"

    def decode(raw: bytes) -> None:
        store.put(key, raw)
        leased_prefixes(store, now_s=1e9)

    return Target(seeds=[encode_lease(1e9), b"1000000000.125"], decode=decode, reseal=resealed_record(2), tree=None)


def use_ready(raw: bytes) -> None:
    ready = decode_proposal(raw, "intents/ready-000003/r00000", "/root")
    choose_proposal([ready])


def message(raw: bytes) -> None:
    here, there = socket.socketpair()
    with here, there:
        here.settimeout(30)
        there.sendall(raw)
        there.close()
        while messages.receive(here) is not None:
            pass


# -- packs and data --------------------------------------------------------------------------------------


def compressed(folder: Path) -> Target:
    store = PosixStore(folder / "packs")
    raw = memoryview(np.arange(50_000, dtype="<u4").tobytes())
    frames = [Frame(start=at, stop=min(at + 70_000, len(raw)), itemsize=4) for at in range(0, len(raw), 70_000)]
    store.put_object("a.fcz", compressed_parts([raw[f.start : f.stop] for f in frames], frames, Codec(), threads=1))

    def reseal(data: bytes) -> bytes:
        if len(data) < 40:
            return data
        magic, version, count, nbytes, whole, _ = struct.unpack("<8sIIQQQ", data[-40:])
        directory = data[max(0, len(data) - 40 - min(nbytes, 1 << 40)) : -40]
        return data[:-40] + struct.pack("<8sIIQQQ", magic, version, count, nbytes, whole, digest(directory))

    def decode(data: bytes) -> None:
        store.put("a.fcz", data)
        out = bytearray(100_000)
        PackedObjects(store).get_range("a.fcz", 60_001, memoryview(out))

    return Target(seeds=[store.get("a.fcz")], decode=decode, reseal=reseal)


STATE = SamplerState(
    seed=1,
    epoch=2,
    offset=30,
    length=100,
    fingerprint=7,
    order="global:feistel8.1",
    segments=(("skip", 3, 9), ("batch", 10, 8)),
).to_dict()
INDEX = index_file.encode(
    "lines", {"identity": "a", "lines": 3}, {"starts": np.arange(4), "other": np.arange(3, dtype="<i4")}
)


def sampler_state() -> Target:
    def decode(raw: bytes) -> None:
        try:
            tree = msgpack.unpackb(raw, strict_map_key=False)
        except (ValueError, TypeError) as error:
            raise DamagedError("not msgpack") from error
        SamplerState.from_dict(tree).to_dict()

    def unpack(raw: bytes) -> Any:
        return msgpack.unpackb(raw)

    return Target(seeds=[msgpack.packb(STATE)], decode=decode, tree=(unpack, msgpack.packb))


def index_tree(raw: bytes) -> Any:
    (length,) = struct.unpack_from("<I", raw, 8)
    return [json.loads(raw[12 : 12 + length]), raw[12 + length :]]


def index_bytes(tree: Any) -> bytes:
    header, body = tree
    text = json.dumps(header).encode()
    return b"".join((index_file.MAGIC, struct.pack("<I", len(text)), text, body))


# -- foreign files ---------------------------------------------------------------------------------------


def imported(path: Path, write: Callable[[bytes], object], kind: str | None = None) -> Callable[[bytes], None]:
    """Import what `write` wrote, and read every byte of every row."""

    def decode(raw: bytes) -> None:
        write(raw)
        found = open_foreign(path, kind or detect(path), Selection())
        for row in found.rows:
            for at in range(0, row.shard.nbytes, 1 << 20):
                row.read(at, min(at + (1 << 20), row.shard.nbytes))

    return decode


STATE_DICT = {
    "model": {"w": torch.arange(12.0).reshape(3, 4), "t": torch.ones(1).expand(3, 3), "b": torch.zeros(0, 2)},
    "step": 7, "betas": (0.9, [1, "x", None]),
}  # fmt: skip


def torch_file(folder: Path) -> Target:
    path = folder / "a.pt"
    seeds = []
    for zipped in (True, False):
        file = io.BytesIO()
        torch.save(STATE_DICT, file, _use_new_zipfile_serialization=zipped)
        seeds.append(file.getvalue())
    return Target(seeds=seeds, decode=imported(path, path.write_bytes), reseal=_zip_again)


def _zip_again(raw: bytes) -> bytes:
    """Return a sound zip whose pickle holds the damage, where that can be told."""
    file = io.BytesIO()
    torch.save(STATE_DICT, file)
    with zipfile.ZipFile(io.BytesIO(file.getvalue())) as archive:
        parts = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    name = next(name for name in parts if name.endswith("data.pkl"))
    own = parts[name]
    at = digest(raw) % max(1, len(own))
    parts[name] = own[:at] + raw[at : at + 3] + own[at + digest(raw) % 4 :]
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for entry, data in parts.items():
            archive.writestr(entry, data)
    return out.getvalue()


def safetensors_file(folder: Path) -> Target:
    path = folder / "a.safetensors"
    header = {"__metadata__": {"format": "pt"}, "w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
              "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}}  # fmt: skip

    def pack(tree: Any) -> bytes:
        text = json.dumps(tree).encode()
        return struct.pack("<Q", len(text)) + text + bytes(32)

    def unpack(raw: bytes) -> Any:
        return json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])

    return Target(seeds=[pack(header)], decode=imported(path, path.write_bytes), tree=(unpack, pack))


def safetensors_index(folder: Path) -> Target:
    home = folder / "hf"
    home.mkdir(exist_ok=True)
    text = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (home / "model-1.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    index = home / "model.safetensors.index.json"
    seed = json.dumps({"metadata": {"total_size": 4}, "weight_map": {"w": "model-1.safetensors"}}).encode()
    tree = (json.loads, lambda tree: json.dumps(tree).encode())
    return Target(seeds=[seed], decode=imported(home, index.write_bytes, "safetensors"), tree=tree)


def dcp_metadata(folder: Path) -> Target:
    home = folder / "dcp"
    torch_dcp.save(STATE_DICT, storage_writer=FileSystemWriter(home), no_dist=True)  # type: ignore[attr-defined]  # as in torch_files
    path = home / ".metadata"
    return Target(seeds=[path.read_bytes()], decode=imported(home, path.write_bytes, "dcp"))


def dcp_item(folder: Path) -> Target:
    home = folder / "dcp-items"
    torch_dcp.save(STATE_DICT, storage_writer=FileSystemWriter(home), no_dist=True)  # type: ignore[attr-defined]  # as in torch_files
    path = home / "__0_0.distcp"
    return Target(seeds=[path.read_bytes()], decode=imported(home, path.write_bytes, "dcp"))


def _values(raw: bytes) -> None:
    body = msgpack.unpackb(encode_manifest(manifest(0))[32:]) | {"values": raw}
    values = decode_manifest(
        sealed_manifest(bytes(32)[:0] + b"FCKMANIF\1\0".ljust(32, b"\0") + msgpack.packb(body))
    ).values
    encode_manifest(replace(manifest(0), values=values))


def _table(raw: bytes) -> None:
    body = msgpack.unpackb(encode_manifest(manifest(0))[32:]) | {"table": raw}
    use_manifest(sealed_manifest(b"FCKMANIF\1\0".ljust(32, b"\0") + msgpack.packb(body)))


CLAIM = Generation(number=3, token="t0k", parent=SnapshotId(2, 100), world_size=8, created_s=1.5)
INTENT = Intent(generation=3, step=120, writers=(0, 1), leader="n", created_s=1.5)
READY = NodeProposal(
    ranks=(0, 1), world_size=2, pinned=SnapshotId(3, 120), at_least=SnapshotId(3, 120), complete=(SnapshotId(3, 120),)
)


def _unpack(raw: bytes) -> Any:
    return msgpack.unpackb(raw, strict_map_key=False)


TARGETS: dict[str, Callable[[Path], Target]] = {
    "manifest": lambda _: Target(
        seeds=[encode_manifest(manifest(0)), encode_manifest(manifest(1, ("a.fck",))), encode_manifest(merged()),
               encode_manifest(ranged()), encode_manifest(merge([ranged()]))],
        decode=use_manifest, reseal=sealed_manifest, tree=(manifest_tree, manifest_bytes),
    ),
    "spread": lambda _: Target(
        seeds=[spread()], decode=use_spread, reseal=sealed_manifest, tree=(spread_tree, spread_bytes)
    ),
    "summary": lambda _: Target(
        seeds=[encode_manifest(merged())], decode=use_summary, reseal=sealed_manifest, tree=(manifest_tree, manifest_bytes)
    ),
    "table": lambda _: Target(
        seeds=[msgpack.unpackb(encode_manifest(manifest(0))[32:])["table"]], decode=_table, tree=(_unpack, msgpack.packb)
    ),
    "values": lambda _: Target(
        seeds=[msgpack.unpackb(encode_manifest(manifest(0))[32:])["values"]], decode=_values, tree=(_unpack, msgpack.packb)
    ),
    "catalogue": catalogue,
    "slot-header": lambda _: Target(seeds=[superblock.encode_header(HEADER)], decode=use_header, reseal=sealed_header),
    "superblock": lambda _: Target(
        seeds=[superblock_bytes()], decode=lambda raw: superblock.decode_superblock(raw, path="x"), reseal=sealed_superblock
    ),
    "owner": lambda _: Target(seeds=[superblock.encode_owner(7, 8)], decode=superblock.decode_owner),
    "segment": segment,
    "control": control,
    "job": lambda folder: job_record(folder, "job", JobConfig(job="j", root="/r", storage_options={"a": 1}, keep_every=5)),
    "generation": lambda folder: job_record(folder, "generation", Generation(number=3, token="t", parent=SnapshotId(2, 4))),
    "daemon": lambda folder: job_record(folder, "daemon", DaemonStatus(committed=SnapshotId(3, 60), error="full", pid=7)),
    "claim": lambda _: record([encode_claim(CLAIM)], lambda raw: decode_claim(raw, "generations/000003", "/root")),
    "unsealed-claim": lambda _: Target(
        seeds=[encode_claim(CLAIM)[24:]], decode=lambda raw: decode_claim(raw, "generations/000003", "/root"),
        tree=(_unpack, msgpack.packb),
    ),
    "intent": lambda _: record([encode_intent(INTENT)], lambda raw: decode_intent(raw, "intents/000003-000000120", "/root")),
    "ready": lambda _: record([encode_proposal(READY)], use_ready),
    "lease": lease,
    "compressed": compressed,
    "sampler-state": lambda _: sampler_state(),
    "sampler-index": lambda _: Target(
        seeds=[INDEX], decode=lambda raw: index_file.decode(raw, "lines", "x"), tree=(index_tree, index_bytes)
    ),
    "launcher-message": lambda _: Target(seeds=[struct.pack("<Q", 15) + b'{"pids": [1,2]}'], decode=message),
    "safetensors": safetensors_file,
    "safetensors-index": safetensors_index,
    "torch": torch_file,
    "dcp-metadata": dcp_metadata,
    "dcp-item": dcp_item,
}  # fmt: skip
