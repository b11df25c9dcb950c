"""Other nodes' memory as a source of a restore: who holds what, and the transfer in rounds, all ranks together.

Nothing is served on demand: a rank that restores also serves, in the same thread, in rounds that all ranks go
through side by side. A round carries at most ROUND_BYTES to a rank and as much away from it, whatever is
wanted, so that memory is bounded; what does not fit is deferred to the next round. A holder sends bytes as they lie in its slot
and the receiver verifies them: a damaged chunk, or a slot that is no more, is read elsewhere by the ordinary rule of `execute`.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgpack
import numpy as np

from flashckpt.collectives import HostGroup
from flashckpt.core.manifest import Manifest, decode_manifest, encode_manifest
from flashckpt.errors import DamagedError, FlashckptError
from flashckpt.faults import crash_point
from flashckpt.planning import peer_index
from flashckpt.planning.peer_index import ANSWER, RECORD, PeerQuery
from flashckpt.planning.pieces import JOB_BYTES, Job, cut_pieces, merge_pieces
from flashckpt.planning.read_plan import ReadPlan
from flashckpt.planning.selection import SlotLocation
from flashckpt.report import guarded
from flashckpt.restore.destinations import Bytes
from flashckpt.restore.sources import Located, Meter, Source, Spans, verify_spans
from flashckpt.shm.segment import Pin
from flashckpt.state import pytree

ROUND_BYTES = 4 * JOB_BYTES
"""Most bytes of state that one round brings to a rank, and most that it takes away from one."""
REQUEST = np.dtype([("job", "<u4"), ("slot", "<u4"), ("start", "<u8"), ("nbytes", "<u4")])
"""A byte range of the data area of a slot; ranges of one job are answered together."""
_SENT, _LATER, _GONE = 0, 1, 2

_log = guarded(logging.getLogger("flashckpt"))


class SlotRange(NamedTuple):
    """A range of the data area of a slot, in bytes."""

    start: int
    nbytes: int


class SlotJob(NamedTuple):
    """What one job wants of one slot."""

    slot: int
    ranges: Sequence[SlotRange]


class PeerSource:
    """A slot in another node's memory: what of it was asked for, filled round by round.

    Args:
        manifest: Of the rows that its holder sent; their places count in the slot's data.
    """

    tier = "peer"
    in_place = True
    page_bytes = 1

    def __init__(self, slot: int, location: SlotLocation, manifest: Manifest) -> None:
        self.slot, self.location, self.manifest = slot, location, manifest
        self.meter = Meter()
        self.name = f"rank {location.rank} (memory of {location.host})"
        self.is_gone = False
        self._arrived: dict[SlotRange, tuple[Bytes, int]] = {}

    def read(self, row: int, start: int, out: memoryview) -> None:
        """See Source: a range that has arrived is copied, then verified in its new place."""
        began = time.perf_counter()
        spans = Spans([row], [start], [start + len(out)])
        data, (at,) = self.located(spans)
        into = np.frombuffer(out, np.uint8)
        np.copyto(into, data[at : at + len(out)])
        copied = time.perf_counter()
        verify_spans(self, spans, Located(into, [0]))
        self.meter.add(0, copied - began, time.perf_counter() - copied, requests=0)

    def verified(self, spans: Spans) -> Located:
        """See Source: the bytes as they arrived."""
        began = time.perf_counter()
        found = self.located(spans)
        verify_spans(self, spans, found)
        self.meter.add(0, 0.0, time.perf_counter() - began, requests=0)
        return found

    def check(self) -> None:
        """See Source: what has arrived is this process' own."""

    def close(self) -> None:
        """See Source."""
        self._arrived.clear()

    def ranges(self, job: Job) -> list[SlotRange]:
        """Return the ranges of the slot's data that a job is made of, each once."""
        p, at = job.pieces, job.rows
        starts = self.manifest.table.byte_offset[p.row[at]] + p.start[at]
        columns = zip(starts.tolist(), (p.stop[at] - p.start[at]).tolist(), strict=True)
        return list(dict.fromkeys(itertools.starmap(SlotRange, columns)))

    def has(self, job: Job) -> bool:
        """Whether all of a job has arrived, or never will."""
        return self.is_gone or all(one in self._arrived for one in self.ranges(job))

    def take_in(self, ranges: Sequence[SlotRange], data: memoryview) -> None:
        """Take bytes that have arrived, one range behind the other; they stay until `close`."""
        block, at = np.frombuffer(data, np.uint8), 0
        for one in ranges:
            self._arrived[one] = block, at
            at += one.nbytes
        self.meter.add(at, 0.0, 0.0, requests=len(ranges))

    def located(self, spans: Spans) -> Located:
        """See Source: where ranges lie among what has arrived; those of several rounds are put together."""
        starts = (self.manifest.table.byte_offset[spans.rows] + np.array(spans.starts, np.int64)).tolist()
        sizes = (np.asarray(spans.stops) - np.asarray(spans.starts)).tolist()
        found = [self._arrived.get(SlotRange(*one)) for one in zip(starts, sizes, strict=True)]
        places = [place for place in found if place is not None]
        if len(places) < len(found):
            raise DamagedError(
                f"a snapshot in memory is no longer there: {self.name}",
                found=f"the rank that answers for it ({self.location.server}) could not read it",
                state="Nothing was taken from it.",
            )
        if len({id(block) for block, _ in places}) == 1:
            return Located(places[0][0], [at for _, at in places])
        whole = np.concatenate([block[at : at + n] for (block, at), n in zip(places, sizes, strict=True)])
        return Located(whole, [0, *itertools.accumulate(sizes)][:-1])


class Peers:
    """All nodes' memory of one snapshot. Every method that says so is a collective of all ranks.

    Args:
        group: Carries host memory between the ranks.
        locations: Every slot that holds the snapshot, the same list on every rank.
        held: What this rank answers for: slot number -> (its pin, its manifest).
    """

    def __init__(
        self,
        group: HostGroup,
        locations: Sequence[SlotLocation],
        held: Mapping[int, tuple[Pin, Manifest]],
        *,
        rank: int,
        node: int,
    ) -> None:
        self._group, self._locations, self._held = group, locations, held
        self._rank, self._node = rank, node
        self._rows: dict[int, set[int]] = {}
        self._values: set[int] = set()
        self.round = 0

    # -- who holds what ----------------------------------------------------------------------------------

    def find(self, wanted: Iterable[PeerQuery]) -> list[PeerSource]:
        """Return the slots of other nodes that hold what is wanted, with what was found before. Collective.

        The slots that reading is meant from come first; after them the ones that stand in for them.
        """
        offers = [peer_index.encode_held_rows(manifest, slot) for slot, (_, manifest) in self._held.items()]
        held = np.concatenate([*offers, np.zeros(0, RECORD)])
        asked = peer_index.encode_queries(wanted)
        primary = self._look_up(self._query_index(held, asked))
        manifests = self._ask_holders()
        return [
            PeerSource(slot, self._locations[slot], manifest)
            for slot, manifest in sorted(manifests.items(), key=lambda one: (one[0] not in primary, one[0]))
        ]

    def _query_index(self, held: peer_index.Records, asked: peer_index.Records) -> list[peer_index.Records]:
        """Send both to where their names are filed; answer what arrives here; return what is answered."""
        ranks = self._group.ranks
        sides = [(records, peer_index.owner_of(records["key"], ranks)) for records in (held, asked)]
        parts = []
        for owner in range(ranks):
            offered, wanted = (records[owners == owner] for records, owners in sides)
            parts.append([np.array([len(offered)], "<u8").tobytes(), offered.tobytes(), wanted.tobytes()])
        heard = [_unpacked(part) for part in self._group.all_to_all(parts)]
        board = np.concatenate([offered for offered, _ in heard])
        found = peer_index.lookup(board, {rank: wanted for rank, (_, wanted) in enumerate(heard)})
        parts = [[found[rank].tobytes()] for rank in range(ranks)]
        return [np.frombuffer(part, ANSWER) for part in self._group.all_to_all(parts)]

    def _look_up(self, answers: Sequence[peer_index.Records]) -> set[int]:
        """Note the rows that were found on other nodes; return the slots that are meant first."""
        primary = set()
        for slot, row, copy in np.concatenate(answers).tolist():
            if self._locations[slot].node == self._node:
                continue
            rows = self._rows.setdefault(slot, set())
            if row >= 0:
                rows.add(row)
            if not copy:
                primary.add(slot)
                self._values.add(slot)
        return primary

    def _ask_holders(self) -> dict[int, Manifest]:
        """Return what the holders send of the noted rows: slot -> a manifest of them, with the values where needed."""
        wanted: list[list[list[object]]] = [[] for _ in range(self._group.ranks)]
        for slot, rows in sorted(self._rows.items()):
            packed = np.array(sorted(rows), "<u4").tobytes()
            wanted[self._locations[slot].server].append([slot, packed, slot in self._values])
        arrived = self._group.all_to_all([[msgpack.packb(one)] for one in wanted])
        described = [[self._describe(*one) for one in msgpack.unpackb(part)] for part in arrived]
        replies = [
            msgpack.unpackb(part) for part in self._group.all_to_all([[msgpack.packb(one)] for one in described])
        ]
        found = {}
        for slot, raw in (one for reply in replies for one in reply if one[1] is not None):
            try:
                found[slot] = decode_manifest(raw)
            except FlashckptError as error:
                _log.warning("rank %d is left out: %s", self._locations[slot].rank, error.problem)
        return found

    def _describe(self, slot: int, packed: bytes, values: bool) -> tuple[int, bytes | None]:
        if slot not in self._held:
            return slot, None
        manifest = self._held[slot][1]
        rows = set(np.frombuffer(packed, "<u4").tolist())
        if values:  # the tensors that the values are made of
            names = {name for value in manifest.values.values() for name in pytree.tensor_names(value)}
            rows |= {row for name in names for row in manifest.table.rows(name)}
        return slot, encode_manifest(peer_index.part_of(manifest, sorted(rows), values=values))

    # -- rounds ------------------------------------------------------------------------------------------

    def transfer(self, jobs: Sequence[SlotJob]) -> list[memoryview | int] | None:
        """Go through one round. Collective.

        Args:
            jobs: Together at most ROUND_BYTES.

        Returns:
            Per job its ranges' bytes one after another, or why there are none; None once no rank wants anything.
        """
        if self._group.total(len(jobs)) == 0:
            return None
        crash_point("peers.before-round")
        by_server: dict[int, list[int]] = {}
        for index, job in enumerate(jobs):
            by_server.setdefault(self._locations[job.slot].server, []).append(index)
        asked = [_requests(jobs, by_server.get(server, ())) for server in range(self._group.ranks)]
        arrived = self._group.all_to_all([[one.tobytes()] for one in asked])
        parts = self._serve([np.frombuffer(part, REQUEST) for part in arrived])
        if any(map(len, arrived)):  # a rank that nothing is wanted of serves nothing
            crash_point("peers.while-serving")
        replies = self._group.all_to_all(parts)
        crash_point("peers.after-round")
        self.round += 1
        found: list[memoryview | int] = [_GONE] * len(jobs)
        for server, indices in by_server.items():
            for index, reply in zip(indices, _replies(replies[server], [jobs[i] for i in indices]), strict=True):
                found[index] = reply
        return found

    def _serve(self, requests: Sequence[peer_index.Records]) -> list[list[object]]:
        """Return what each rank is sent: a byte per job, then the bytes of the jobs that fit, in turn over the ranks."""
        parts: list[list[object]] = [[] for _ in requests]
        current = {slot: self._is_current(slot) for slot in self._held}
        left, ranks = ROUND_BYTES, len(requests)
        for rank in ((self.round + k) % ranks for k in range(ranks)):
            states, data = bytearray(), []
            wanted = requests[rank]
            for ranges in np.split(wanted, np.flatnonzero(np.diff(wanted["job"])) + 1) if len(wanted) else ():
                views = self._views(ranges, current)
                nbytes = int(ranges["nbytes"].sum())
                states.append(_GONE if views is None else _LATER if nbytes > left else _SENT)
                if views is not None and nbytes <= left:
                    left -= nbytes
                    data += views
            parts[rank] = [bytes(states), *data]
        return parts

    def _is_current(self, slot: int) -> bool:
        try:
            return self._held[slot][0].is_current()
        except OSError:
            return False

    def _views(self, ranges: peer_index.Records, current: Mapping[int, bool]) -> list[memoryview] | None:
        views = []
        for slot, start, nbytes in ranges[["slot", "start", "nbytes"]].tolist():
            if not current.get(slot):
                return None
            data = self._held[slot][0].data
            if start + nbytes > len(data):
                return None
            views.append(data[start : start + nbytes])
        return views


class PeerExchange:
    """What `execute` does about jobs that other nodes hold: one round of all ranks after another. See Peers."""

    def __init__(self, peers: Peers, sources: Sequence[Source]) -> None:
        self._peers = peers
        self._sources: dict[int, PeerSource] = {k: s for k, s in enumerate(sources) if isinstance(s, PeerSource)}
        self._storage = next((k for k, source in enumerate(sources) if source.tier == "storage"), None)
        self.is_over = False

    def jobs(self, plan: ReadPlan) -> list[Job]:
        """See RemoteFetcher."""
        return merge_pieces(cut_pieces(plan))

    def is_far(self, job: Job) -> bool:
        """Whether the bytes of a job are still on another node."""
        source = self._sources.get(job.source)
        return source is not None and not source.has(job)

    def is_again(self, job: Job) -> bool:  # noqa: ARG002 -- another source is read
        """See RemoteFetcher."""
        return False

    def near(self, job: Job) -> int | None:  # noqa: ARG002 -- a checkpoint has all of it, or the plan says what it has not
        """See RemoteFetcher."""
        return self._storage

    def exchange(self, jobs: Sequence[Job]) -> tuple[list[Job], list[Job]] | None:
        """Go through one round; what arrived in the one before is given up. Collective.

        Returns:
            (jobs that can be run now, jobs for a later round); None when no rank wants anything any more.
        """
        for source in self._sources.values():
            source.close()
        now: list[Job] = []
        later: list[Job] = []
        nbytes = 0
        # where there is a choice the first round is short: it shows how fast the others are
        most = JOB_BYTES if self._storage is not None and not self._peers.round else ROUND_BYTES
        for job in jobs:
            size = sum(one.nbytes for one in self._of(job).ranges)
            fits = not now or nbytes + size <= most
            (now if fits else later).append(job)
            nbytes += size if fits else 0
        replies = self._peers.transfer([self._of(job) for job in now])
        if replies is None:
            self.is_over = True
            return None
        arrived: list[Job] = []
        waiting: list[Job] = []
        for job, reply in zip(now, replies, strict=True):
            (waiting if reply == _LATER else arrived).append(job)
            self._take_in(job, reply)
        return arrived, waiting + later

    def drain(self) -> None:
        """Serve the others to the end without wanting anything: a rank that failed may not leave them waiting. Collective."""
        while not self.is_over:
            self.exchange([])

    def _of(self, job: Job) -> SlotJob:
        source = self._sources[job.source]
        return SlotJob(source.slot, source.ranges(job))

    def _take_in(self, job: Job, reply: memoryview | int) -> None:
        source = self._sources[job.source]
        if reply == _GONE:
            source.is_gone = True
        elif not isinstance(reply, int):
            source.take_in(source.ranges(job), reply)


def _unpacked(part: memoryview) -> tuple[peer_index.Records, peer_index.Records]:
    count = int(np.frombuffer(part[:8], "<u8")[0])
    end = 8 + count * RECORD.itemsize
    return np.frombuffer(part[8:end], RECORD), np.frombuffer(part[end:], RECORD)


def _requests(jobs: Sequence[SlotJob], indices: Sequence[int]) -> peer_index.Records:
    rows = [(index, jobs[index].slot, *one) for index in indices for one in jobs[index].ranges]
    return np.array(rows, REQUEST)


def _replies(part: memoryview, jobs: Sequence[SlotJob]) -> list[memoryview | int]:
    """Take one holder's part to pieces: per job the bytes of its ranges, or why there are none.

    A part that ends too early, or says what no holder says, counts as a slot that is gone: another source is read.
    """
    states, at = bytes(part[: len(jobs)]).ljust(len(jobs), bytes([_GONE])), len(jobs)
    found: list[memoryview | int] = []
    for state, job in zip(states, jobs, strict=True):
        size = sum(one.nbytes for one in job.ranges)
        if state == _SENT and at + size <= len(part):
            found.append(part[at : at + size])
            at += size
            continue
        found.append(_LATER if state == _LATER else _GONE)
        at = len(part) if state == _SENT else at
    return found
