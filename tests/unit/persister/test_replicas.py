"""Replicas between persisters: what arrives, what is kept, dropped connections, killed senders and receivers."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.daemons import ForkedDaemon, daemon_of
from support.ranks import wait_for
from support.replicas import Replicating, everywhere, memory_of, replicas_of, replication, turn_all

from flashckpt.cli.main import main
from flashckpt.core.lineage import Generation
from flashckpt.core.manifest import encode_manifest
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.daemon.persister.service import Daemon
from flashckpt.faults import CRASH_POINTS
from flashckpt.replicate import records, rounds
from flashckpt.replicate.connections import SMALL, linked
from flashckpt.replicate.records import ReplicaSession
from flashckpt.replicate.replica_rounds import NodeReport, RoundDecision
from flashckpt.replicate.replica_rows import replica_manifest
from flashckpt.replicate.service import ReplicationService
from flashckpt.replicate.slots import Kept, ReplicaSlots, chunk_ranges
from flashckpt.shm import private
from flashckpt.shm.inventory import NodeInventory
from flashckpt.shm.segment import Segment

SHAPES = {"w": (1200, 700), "b": (7,)}
"""3.4 MB: several chunks for each rank."""


@contextlib.contextmanager
def daemons_of(them: Replicating) -> Iterator[list[Daemon]]:
    with contextlib.ExitStack() as stack:
        daemons = [stack.enter_context(daemon_of(job)) for job in them.jobs]
        for daemon in daemons:
            daemon.turn()
        them.write_session()
        yield daemons


def test_each_node_keeps_what_its_neighbour_alone_holds_and_nothing_else(shm_dir: Path) -> None:
    them = Replicating(shm_dir, 3, per_node=2, shapes=SHAPES)
    with daemons_of(them) as daemons:
        assert them.step(2)
        turn_all(daemons, lambda: all(everywhere(d) == (1, 2) for d in daemons), "step 2 on all partners")
        kept = [replicas_of(job.directory) for job in them.jobs]
        assert [sorted({rank for rank, _ in one}) for one in kept] == [[4, 5], [0, 1], [2, 3]]
        for one in kept:
            for (rank, _), manifest in one.items():
                own = them.jobs[rank // 2].ranks[rank % 2]
                assert manifest.is_part
                assert sorted(manifest.table.fqns) == sorted(own.table.fqns)
                assert manifest.values == {"step": 2, f"rng@rank{own.rank}": own.generator(1, 2)}
        state = replication(daemons[0]).state()
        assert (state.lag_steps, state.pending_bytes, state.problem) == (0, 0, "")
        read = them.jobs[1].directory.read_status
        turn_all(
            daemons, lambda: (status := read()) is not None and status.replicated == (1, 2), "the status of node 1"
        )


def test_replica_slots_are_overwritten_in_turn_and_the_newest_everywhere_stays_pinned_at_home(shm_dir: Path) -> None:
    them = Replicating(shm_dir, 2, slots=4)
    with daemons_of(them) as daemons:
        for step in range(2, 12, 2):
            assert them.step(step)
            turn_all(daemons, lambda s=step: all(everywhere(d) == (1, s) for d in daemons), f"step {step}")  # type: ignore[misc]
        assert {i for _, i in replicas_of(them.jobs[0].directory)} == {(1, 8), (1, 10)}
        segment = them.jobs[0].ranks[0].segment
        turn_all(daemons, lambda: len(segment.busy()) == 1, "one pin")
        (slot,) = segment.busy()
        assert segment.headers()[slot].identity == (1, 10)


@pytest.mark.parametrize(("asked", "expected"), [("", 19), ("7", 7)])
def test_threads_that_send_and_receive_replicas_give_way_and_no_others(
    shm_dir: Path, monkeypatch: pytest.MonkeyPatch, asked: str, expected: int
) -> None:
    monkeypatch.setenv("FLASHCKPT_REPLICA_NICE", asked)
    them = Replicating(shm_dir, 2)
    with daemons_of(them) as daemons:
        assert them.step(1)
        turn_all(daemons, lambda: all(everywhere(d) == (1, 1) for d in daemons), "step 1")
        found = {
            one.name: os.getpriority(os.PRIO_PROCESS, one.native_id)
            for one in threading.enumerate()
            if one.native_id is not None
        }
    bulk = {name for name in found if name == "flashckpt-replica" or name.startswith("flashckpt-send-")}
    assert bulk == {"flashckpt-replica", "flashckpt-send-0", "flashckpt-send-1"}
    here = found["MainThread"]
    assert {name: found[name] for name in found} == {name: expected if name in bulk else here for name in found}


def test_two_partners_each_hold_all_of_a_node(shm_dir: Path) -> None:
    them = Replicating(shm_dir, 3, replicas=2)
    with daemons_of(them) as daemons:
        assert them.step(1)
        turn_all(daemons, lambda: all(everywhere(d) == (1, 1) for d in daemons), "step 1")
        assert [{rank for rank, _ in replicas_of(job.directory)} for job in them.jobs] == [{1, 2}, {0, 2}, {0, 1}]


def test_only_every_kth_step_is_replicated_and_lag_says_what_is_not(shm_dir: Path) -> None:
    them = Replicating(shm_dir, 2, slots=4)
    them.every = 4
    with daemons_of(them) as daemons:
        assert them.step(4)
        turn_all(daemons, lambda: all(everywhere(d) == (1, 4) for d in daemons), "step 4")
        assert them.step(6)
        turn_all(daemons, lambda: replication(daemons[0]).state().lag_steps == 2, "a lag of 2 steps")
        assert {i for _, i in replicas_of(them.jobs[0].directory)} == {(1, 4)}
        assert daemons[0].numbers()["replica_lag_steps"] == 2
        assert daemons[0].numbers()["replicated_step"] == 4


def test_partner_that_is_gone_costs_replicas_and_nothing_else_and_is_found_again(shm_dir: Path) -> None:
    them = Replicating(shm_dir, 2, slots=4, shapes=SHAPES)
    with daemon_of(them.jobs[0]) as first:
        first.turn()
        with daemon_of(them.jobs[1]) as second:
            second.turn()
            them.write_session()
            assert them.step(2)
            turn_all([first, second], lambda: everywhere(first) == (1, 2), "step 2")
        assert them.step(4)
        turn_all([first], lambda: "cannot be reached" in replication(first).state().problem, "the problem to be named")
        assert replication(first).state().lag_steps == 2
        status = them.jobs[0].directory.read_status()
        assert status is not None
        assert status.replica_lag == 2
        assert them.step(6)
        with daemon_of(them.jobs[1]) as second:  # another process of that node, on the same port
            turn_all([first, second], lambda: everywhere(first) == everywhere(second) == (1, 6), "step 6")
            assert replication(first).state().problem == ""


def test_one_node_that_is_gone_does_not_stop_the_others_and_catches_up_when_it_is_back(
    shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it what was everywhere stays; what is newer moves on beside it, in the second slot, again and again."""
    monkeypatch.setenv("FLASHCKPT_REPLICA_PATIENCE", "1.5")
    them = Replicating(shm_dir, 4, slots=4)
    with contextlib.ExitStack() as stack:
        first, second, fourth = (stack.enter_context(daemon_of(them.jobs[node])) for node in (0, 1, 3))
        rest = [first, second, fourth]
        with daemon_of(them.jobs[2]) as third:
            for daemon in (*rest, third):
                daemon.turn()
            them.write_session()
            assert them.step(2)
            turn_all([*rest, third], lambda: all(everywhere(d) == (1, 2) for d in (*rest, third)), "step 2")
        for step in (4, 6, 8):
            for node in (0, 1, 3):
                assert them.jobs[node].step(step)
            turn_all(rest, lambda s=step: kept_at(them, 1) == {(0, (1, 2)), (0, (1, s))}, f"step {step} at node 1")  # type: ignore[misc]
        turn_all(rest, lambda: kept_at(them, 0) == {(3, (1, 2)), (3, (1, 8))}, "step 8 at node 0")
        assert {everywhere(daemon) for daemon in rest} == {(1, 2)}
        turn_all(
            rest, lambda: {replication(d).state().without for d in rest} == {("node 2",)}, "node 2 to be passed over"
        )
        assert kept_at(them, 3) == {(2, (1, 2))}  # what it has sent itself is as safe as before
        assert kept_at(them, 2) == {(1, (1, 2))}
        with daemon_of(them.jobs[2]) as third:
            everyone = [*rest, third]
            turn_all(everyone, lambda: not any(replication(d).state().without for d in everyone), "all to take part")
            assert them.step(10)
            turn_all(everyone, lambda: all(everywhere(d) == (1, 10) for d in everyone), "step 10 everywhere")
        for node in range(4):
            assert ((node + 3) % 4, (1, 10)) in kept_at(them, node)


def test_first_node_that_is_gone_does_not_stop_the_others(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHCKPT_REPLICA_PATIENCE", "1.5")
    them = Replicating(shm_dir, 3, slots=4)
    with daemon_of(them.jobs[1]) as second, daemon_of(them.jobs[2]) as third:
        with daemon_of(them.jobs[0]) as first:
            everyone = [first, second, third]
            for daemon in everyone:
                daemon.turn()
            them.write_session()
            assert them.step(2)
            turn_all(everyone, lambda: all(everywhere(d) == (1, 2) for d in everyone), "step 2")
        assert them.jobs[1].step(4), them.jobs[2].step(4)
        assert them.jobs[2].step(4)
        turn_all([second, third], lambda: (1, (1, 4)) in kept_at(them, 2), "step 4 at node 2")
        assert (everywhere(second), everywhere(third)) == ((1, 2), (1, 2))
        with daemon_of(them.jobs[0]) as first:
            everyone = [first, second, third]
            turn_all(everyone, lambda: not any(replication(d).state().without for d in everyone), "all to take part")
            assert them.step(6)
            turn_all(everyone, lambda: all(everywhere(d) == (1, 6) for d in everyone), "step 6 everywhere")


def test_partner_that_listens_nowhere_is_passed_over_and_what_is_on_storage_need_not_be_kept(
    shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reports and sends all the same, so that both slots of the others move on as soon as storage has what was everywhere."""
    monkeypatch.setenv("FLASHCKPT_REPLICA_PATIENCE", "1.5")
    them = Replicating(shm_dir, 3, slots=4)
    with daemons_of(them) as daemons:
        assert them.step(2)
        turn_all(daemons, lambda: all(everywhere(d) == (1, 2) for d in daemons), "step 2")
        for job in them.jobs:
            assert job.step(3, persist=True)
        turn_all(daemons, lambda: all(replication(d)._committed == (1, 3) for d in daemons), "step 3 on storage")
        turn_all(daemons, lambda: all(everywhere(d) == (1, 3) for d in daemons), "step 3")
        listener = replication(daemons[1])._listener
        assert listener is not None
        listener.close()
        for step in (4, 6, 8):
            assert them.step(step)
            turn_all(daemons, lambda s=step: all(everywhere(d) == (1, s) for d in daemons), f"step {step}")  # type: ignore[misc]
        assert kept_at(them, 2) == {(1, (1, 6)), (1, (1, 8))}
        assert kept_at(them, 0) == {(2, (1, 6)), (2, (1, 8))}
        turn_all(daemons, lambda: replication(daemons[0]).state().without == ("node 1",), "node 1 to be passed over")


def kept_at(them: Replicating, node: int) -> set[tuple[int, SnapshotId]]:
    return set(replicas_of(them.jobs[node].directory))


class Cutting:
    """Lets a port through to a persister, and cuts each connection after so many bytes."""

    def __init__(self, port: int, cut_after: int) -> None:
        self._port, self.cut_after, self.cuts = port, cut_after, 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._socket.accept()
                there = socket.create_connection(("127.0.0.1", self._port))
                threading.Thread(target=self._pass, args=(here, there, self.cut_after), daemon=True).start()
                threading.Thread(target=self._pass, args=(there, here, 1 << 60), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, left: int) -> None:
        with contextlib.suppress(OSError):
            while left > 0 and (data := source.recv(min(left, 1 << 16))):
                target.sendall(data)
                left -= len(data)
        if left <= 0:
            self.cuts += 1
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        source.close()


def test_connection_that_is_cut_again_and_again_is_resumed_where_it_was(shm_dir: Path) -> None:
    """4.2 MB per rank through connections that live for 1.5 MB: from the start each time, it would never be whole."""
    them = Replicating(shm_dir, 2, slots=4, shapes={"w": (2400, 875)})
    with daemon_of(them.jobs[0]) as first, daemon_of(them.jobs[1]) as second:
        first.turn(), second.turn()
        endpoint = records.read_endpoint(them.jobs[1].directory)
        assert endpoint is not None
        cutting = Cutting(endpoint.port, cut_after=1_500_000)
        with contextlib.closing(cutting):
            them.write_session()
            session = records.read_session(them.jobs[0].directory)
            assert session is not None
            addresses = (session.addresses[0], f"127.0.0.1 {cutting.port}")
            private.write_record(records.session_path(them.jobs[0].directory), replace(session, addresses=addresses))
            assert them.step(2)
            turn_all([first, second], lambda: everywhere(first) == (1, 2), "step 2")
            assert cutting.cuts >= 2
        assert replicas_of(them.jobs[1].directory).keys() == {(0, (1, 2))}


SENDER = ["replica.before-offer", "replica.during-send"]
RECEIVER = ["replica.after-begin", "replica.during-receive", "replica.before-complete", "replica.after-complete"]
assert {*SENDER, *RECEIVER} == {p for p in CRASH_POINTS if p.startswith("replica.")}


def test_new_persister_says_nothing_before_it_knows_what_its_node_holds(
    shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that holds nothing can finish nothing: what is under way would be given up for it."""
    them, advance, reports = Replicating(shm_dir, 2, slots=4, shapes=SHAPES), ReplicationService._advance, []

    def looks(service: ReplicationService, session: ReplicaSession, view: NodeInventory) -> None:
        reports.append(service._reporter is not None)
        advance(service, session, view)

    monkeypatch.setattr(ReplicationService, "_advance", looks)
    with daemon_of(them.jobs[0]) as first, daemon_of(them.jobs[1]) as second:
        turn_all([first, second], lambda: all(records.read_endpoint(job.directory) for job in them.jobs), "addresses")
        them.write_session()
        first.turn()
        first.turn()
    assert reports == [False, True]


@pytest.mark.matrix
@pytest.mark.parametrize("point", [*SENDER, *RECEIVER])
def test_persister_killed_at_point_no_torn_replica_and_the_next_one_finishes(point: str, shm_dir: Path) -> None:
    """Node 0 decides and sends; the persister that is killed is that of node 1, which sends to node 0 and receives from it."""
    them = Replicating(shm_dir, 2, slots=4, shapes=SHAPES)
    with daemon_of(them.jobs[0]) as first:
        first.turn()
        killed = ForkedDaemon(them.jobs[1], crash_at=point)
        wait_for(lambda: records.read_endpoint(them.jobs[1].directory), what="the address")
        them.write_session()
        assert them.step(2)
        turn_all([first], lambda: killed.poll() is not None, f"the death at {point}")
        killed.wait_killed()
        for job in them.jobs:
            assert all(identity == (1, 2) for _, identity in replicas_of(job.directory))  # whole, or not there
        with daemon_of(them.jobs[1]) as second:
            turn_all([first, second], lambda: everywhere(first) == everywhere(second) == (1, 2), "step 2")
        assert replicas_of(them.jobs[0].directory).keys() == {(1, (1, 2))}
        assert replicas_of(them.jobs[1].directory).keys() == {(0, (1, 2))}


def test_snapshot_that_was_damaged_at_home_is_not_replicated_and_the_next_one_is(shm_dir: Path) -> None:
    them = Replicating(shm_dir, 2, slots=4)
    with daemons_of(them) as daemons:
        assert them.step(2)
        segment = them.jobs[0].ranks[0].segment
        segment.buffer[segment.spec.data_at(0)] ^= 1
        turn_all(daemons, lambda: any(s.progress.damaged for s in replication(daemons[0])._senders), "the damage")
        assert them.step(4)
        turn_all(daemons, lambda: all(everywhere(d) == (1, 4) for d in daemons), "step 4")
        assert (0, (1, 2)) not in replicas_of(them.jobs[1].directory)


def test_stranger_is_refused_before_anything_is_read(shm_dir: Path) -> None:
    them = Replicating(shm_dir, 3)  # the persister of node 1 sends to node 2: it takes no place of this connection
    with daemons_of(them) as daemons:
        turn_all(daemons, lambda: all(replication(d).session for d in daemons), "the session")
        endpoint = records.read_endpoint(them.jobs[0].directory)
        assert endpoint is not None
        session = records.read_session(them.jobs[1].directory)
        assert session is not None
        stranger = socket.create_connection(("127.0.0.1", endpoint.port), timeout=10)
        with stranger, pytest.raises(ConnectionResetError):
            linked(stranger, replace(session, secret={"key": b"another secret of 32 bytes length"}), accepts=False)
        with socket.create_connection(("127.0.0.1", endpoint.port), timeout=10) as friend:
            link = linked(friend, session, accepts=False)
            link.send({"kind": "replicas", "node": 1, "generation": 7}, 10)
            assert link.receive_map(10, SMALL) == {"state": "other session"}


@pytest.mark.parametrize("nbytes", [1 << 60, -1])
def test_chunk_of_an_absurd_length_ends_the_connection(shm_dir: Path, nbytes: int) -> None:
    them = Replicating(shm_dir, 3)  # the persister of node 1 sends to node 2: it takes no place of this connection
    with daemons_of(them) as daemons:
        turn_all(daemons, lambda: all(replication(d).session for d in daemons), "the session")
        endpoint = records.read_endpoint(them.jobs[0].directory)
        session = records.read_session(them.jobs[1].directory)
        assert endpoint is not None
        assert session is not None
        with socket.create_connection(("127.0.0.1", endpoint.port), timeout=10) as node:
            link = linked(node, session, accepts=False)
            link.send({"kind": "replicas", "node": 1, "generation": session.generation}, 10)
            assert link.receive_map(10)["state"] == "ready"
            link.send({"chunk": 0, "bytes": nbytes}, 10)
            with pytest.raises(ConnectionError):
                link.receive(10)


def test_replica_of_another_run_with_the_same_id_is_neither_here_already_nor_kept(shm_dir: Path) -> None:
    """Two runs took the same number, each without the root: what one has sent is not what the other one sends."""
    them = Replicating(shm_dir, 2)
    assert them.step(2)
    segment = them.jobs[0].ranks[0].segment
    (slot,) = [at for at, header in enumerate(segment.headers()) if header.is_complete]
    place = ReplicaSlots(them.jobs[1].directory, root_digest=1)
    pin = segment.pin(slot)
    assert pin is not None
    with contextlib.closing(place), pin:
        whole = pin.manifest()
        for token in ("one", "other", "other"):
            part = replace(replica_manifest(whole, np.arange(len(whole.table))), token=token)
            kept = Kept(
                generation=Generation(number=1, token=token), identity=part.identity if token == "one" else None
            )
            coming = place.begin(encode_manifest(part), kept=kept, persist=False, ranks=[0])
            if coming is None:
                break
            for chunk, (start, nbytes) in enumerate(zip(*chunk_ranges(part), strict=True)):
                buffer = bytearray(int(nbytes))
                pin.read_into(int(start), memoryview(buffer))
                coming.take_in(chunk, memoryview(buffer))
            assert coming.commit()
            assert place.holds(0, kept) == [(1, 2)]
        else:
            pytest.fail("the second time it is here")
        of_other = Kept(generation=Generation(number=1, token="third"), identity=SnapshotId(1, 2))
        assert place.holds(0, of_other) == []
        (path,) = them.jobs[1].directory.replica_segments()
        with contextlib.closing(Segment.attach(path)) as kept_segment:
            assert of_other.slot(kept_segment.headers(), ()) is not None, "else nothing ever gives way"


def test_next_generation_keeps_what_it_was_restored_from_until_its_own_is_everywhere(shm_dir: Path) -> None:
    them = Replicating(shm_dir, 2, slots=4)
    parent = SnapshotId(1, 4)
    with daemons_of(them) as daemons:
        for step in (2, 4):
            assert them.step(step)
            turn_all(daemons, lambda s=step: all(everywhere(d) == (1, s) for d in daemons), f"step {step}")  # type: ignore[misc]
        them.begin_again(parent)
        them.write_session(restored=parent)
        turn_all(
            daemons,
            lambda: all(getattr(replication(d).session, "generation", 0) == 2 for d in daemons),
            "it",
        )
        assert everywhere(daemons[0]) is None
        assert {i for _, i in replicas_of(them.jobs[0].directory)} == {(1, 2), parent}
        assert them.step(5)
        turn_all(daemons, lambda: all(everywhere(d) == (2, 5) for d in daemons), "step 5")
        assert {i for _, i in replicas_of(them.jobs[0].directory)} == {parent, (2, 5)}


def test_persister_that_was_started_again_keeps_what_another_one_knows_to_be_everywhere(shm_dir: Path) -> None:
    them = Replicating(shm_dir, 2, slots=4)
    with daemon_of(them.jobs[1]) as survivor:
        with daemon_of(them.jobs[0]) as first:
            daemons = [first, survivor]
            for daemon in daemons:
                daemon.turn()
            them.write_session()
            assert them.step(4)
            turn_all(daemons, lambda: all(everywhere(d) == (1, 4) for d in daemons), "step 4")
        assert them.step(6)  # each node has it, and no partner
        them.begin_again(SnapshotId(1, 6))
        with daemon_of(them.jobs[0]) as again:
            again.turn()
            them.write_session(restored=SnapshotId(1, 6))
            service = replication(again)

            def known() -> SnapshotId | None:
                return None if (kept := service.kept()) is None else kept.identity

            turn_all([again, survivor], lambda: known() is not None, "the first decision")
            assert known() == (1, 4)


def test_command_shows_whose_replicas_of_which_step_how_many_bytes_and_the_lag(
    shm_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:

    def said(*words: str) -> str:
        with pytest.raises(SystemExit) as end:
            main(list(words))
        assert not end.value.code
        return capsys.readouterr().out

    them = Replicating(shm_dir, 2, per_node=2, slots=4)
    with daemons_of(them) as daemons:
        assert all([job.step(2, persist=True) for job in them.jobs])  # noqa: C419 -- both take it
        turn_all(daemons, lambda: all(everywhere(d) == (1, 2) for d in daemons), "step 2")
        read = them.jobs[1].directory.read_status
        turn_all(daemons, lambda: (s := read()) is not None and s.replicated == s.committed == (1, 2), "the status")
        nbytes = sum(int(rank.table.nbytes.sum()) for rank in them.jobs[0].ranks)
        with memory_of(shm_dir / "node1"):
            (job,) = json.loads(said("status", "--json"))["jobs"]
            assert job["replicas"]["partners"] == ["node 0"]
            assert (job["replicas"]["replicated"], job["replicas"]["lag_steps"]) == ([1, 2], 0)
            (kept,) = job["replicas"]["kept"]
            assert (kept["step"], kept["node"], kept["ranks"]) == (2, "node 0", [0, 1])
            assert kept["nbytes"] >= nbytes
            assert "2.g1 with node 0; keeps" in said("status")
            assert "of node 0: ranks 0, 1" in said("ls", them.jobs[0].root)
            rows = json.loads(said("ls", them.jobs[0].root, "--json"))["checkpoints"]
            (row,) = [row for row in rows if row["state"] == "replica"]
            assert (row["tier"], row["step"], row["replica_of"]) == ("memory", 2, {"node": "node 0", "ranks": [0, 1]})
            shown = json.loads(said("inspect", them.jobs[0].root, "--coverage", "--json"))["coverage"]
            found = {one["source"]: one for one in shown}
            assert {"rank 2", "rank 3", "replica of rank 0", "replica of rank 1"} < found.keys()
            assert found["all ranks here"]["missing_bytes"] == 0
            (behind,) = json.loads(said("inspect", them.jobs[0].root, "--coverage", "--json"))["replication"]
            assert (behind["partners"], behind["replicated"], behind["lag_steps"]) == (["node 0"], [1, 2], 0)
            assert "2.g1 with node 0" in said("inspect", them.jobs[0].root, "--coverage")
            them.jobs[1].step(4)  # nobody has sent it yet
            rows = json.loads(said("ls", them.jobs[0].root, "--json"))["checkpoints"]
            snapshots = {row["step"]: row for row in rows if row["state"] == "snapshot"}
            assert {step: row["replicated"] for step, row in snapshots.items()} == {2: True, 4: False}
            lines = said("ls", them.jobs[0].root).splitlines()
            assert [" not yet with node 0" in one for one in lines if " memory " in one and " snapshot " in one] == [
                True,
                False,
            ]


def test_rounds_go_on_after_an_error_that_nobody_foresaw(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rounds, "IDLE_S", 0.01)
    session = records.ReplicaSession(
        generation=1, node=0, addresses=("", ""), domains=("a", "b"), ranks=("0", "1"), replicas=1
    )
    turns, decisions = [], list[RoundDecision]()

    def report() -> NodeReport:
        turns.append(1)
        if len(turns) < 3:
            raise ValueError("a fault of ours")
        return NodeReport()

    reporter = rounds.RoundsReporter(
        session,
        threading.Event(),
        report=report,
        decide_here=lambda _, __: RoundDecision(),
        decided=decisions.append,
    )
    try:
        wait_for(lambda: decisions, what="a decision")
    finally:
        reporter.close()
    assert caplog.text.count("a round of replicas failed") == 1
    assert reporter.problem == ""
