"""The start of replication on one rank: who keeps replicas of whom, of which rows, and where persisters listen. Collective."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from flashckpt import collectives
from flashckpt.collectives import HostGroup
from flashckpt.core.lineage import BEGINNING
from flashckpt.core.settings import Settings
from flashckpt.core.shard_table import ShardTable
from flashckpt.environment import Environment, env
from flashckpt.errors import FlashckptError
from flashckpt.planning.inventory import Inventory, host_names, local_world, node_names
from flashckpt.planning.peer_index import owner_of
from flashckpt.replicate import records
from flashckpt.replicate.partners import partner_map, senders_to
from flashckpt.replicate.records import ReplicaRows, ReplicaSession
from flashckpt.replicate.replica_rows import Keys, Masks, ReplicaMap, replica_bytes, row_keys, rows_for
from flashckpt.replicate.slots import REPLICA_SLOTS
from flashckpt.report import notice
from flashckpt.restore.coordinator import RestoreOutcome
from flashckpt.shm import private
from flashckpt.shm.agent_folder import link_key, ranks_key
from flashckpt.shm.job_directory import JobDirectory

LISTENS_S = 30.0
"""Seconds within which the persister of a node says where it listens: dlrun, or the first rank, has just started it."""
_logger = logging.getLogger("flashckpt")
_MANIFEST_BYTES = 200
"""Bytes of a row in a manifest, about; a replica segment has twice the room."""


def failure_domain(environment: Mapping[str, str] = os.environ) -> str:
    """Return the name of what fails together with this node; "" where nothing says so, and the node stands for itself.

    FLASHCKPT_REPLICA_DOMAIN (`dlrun --replica-domain`), else the switch of the node in Slurm's topology.
    """
    values = Environment(environment)
    if chosen := values.FLASHCKPT_REPLICA_DOMAIN.strip():
        return chosen
    switches = values.SLURM_TOPOLOGY_ADDR.split(".")[:-1]
    kinds = values.SLURM_TOPOLOGY_ADDR_PATTERN.split(".")[:-1]
    return ".".join(switches) if switches and len(kinds) == len(switches) and set(kinds) != {"node"} else ""


def own_address(towards: str) -> str:
    """Return the address of this node from which packets to `towards` leave; "" where there is no way there."""
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, _, _, place in socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(place)  # sends nothing
                return str(probe.getsockname()[0])
    return ""


def _is_reachable(address: str) -> bool:
    with contextlib.suppress(ValueError):
        return not ipaddress.ip_address(address).is_loopback
    return False


@dataclass(frozen=True, kw_only=True, eq=False)
class Partnering:
    """The partners and places that the ranks agreed on before the restore.

    Attributes:
        settings: The checkpointer's settings.
        rank: This rank.
        node: Its node's index.
        mates: Ranks of this node.
        known: Nodes, domains and partners.
        addresses: Each node's address.
        hosts: Names of the nodes, for people.
        keys, masks: Of this rank's rows.
        sent_bytes: Bytes that this node's ranks send of one snapshot, to all partners together.
        kept_bytes: Memory that replicas of other nodes take here, on this node.
        missing_bytes: The part of them that is not there yet.
        secret: For the persisters of the session; the job secret is in it, where there is one.
    """

    settings: Settings
    rank: int
    node: int
    mates: Sequence[int]
    known: ReplicaMap
    addresses: Sequence[str]
    hosts: Sequence[str]
    keys: Keys
    masks: Masks
    sent_bytes: int
    kept_bytes: int
    missing_bytes: int
    secret: bytes = field(repr=False)

    @classmethod
    def agree(
        cls, settings: Settings, inventories: Sequence[Inventory], table: ShardTable, directory: JobDirectory
    ) -> Partnering:
        """Find out who keeps what of whom. Collective.

        Args:
            settings: The checkpointer's settings.
            inventories: The inventories of all ranks.
            table: The rows of this rank's snapshots.
            directory: The job's directory on this node.
        """
        names = node_names(inventories)
        node_of = [names.index(one.node) for one in inventories]
        group = HostGroup()
        try:
            rank = _rank()
            facts = collectives.all_gather([failure_domain(), _own_address(), _kept_bytes(directory)])
            first = [node_of.index(node) for node in range(len(names))]
            domains = [facts[r][0] or names[node_of[r]] for r in first]
            address = _address([facts[r][1] for r in first], node_of[rank])
            partners = partner_map(domains, settings.replicate)
            known = ReplicaMap(
                node_of=node_of, domains=domains, partners=partners, replicas=min(settings.replicate, len(names) - 1)
            )
            keys = row_keys(table)
            masks = _masks(group, known, keys)
        finally:
            group.close()
        sent = [_slot_bytes(table, rows_for(masks, k)) for k in range(known.replicas)]
        all_sent = collectives.all_gather(sent)
        node = node_of[rank]
        kept = sum(
            REPLICA_SLOTS * all_sent[r][partners[sender].index(node)]
            for sender in senders_to(partners, node)
            for r in range(len(node_of))
            if node_of[r] == sender
        )
        return cls(
            settings=settings,
            rank=rank,
            node=node,
            mates=local_world(inventories, rank),
            known=known,
            addresses=_gathered(address, first),
            hosts=host_names(inventories),
            keys=keys,
            masks=masks,
            sent_bytes=sum(sum(all_sent[r]) for r in range(len(node_of)) if node_of[r] == node),
            kept_bytes=kept,
            missing_bytes=max(0, kept - facts[first[node]][2]),
            secret=link_key(ranks_key(), collectives.bytes_from_rank_0(os.urandom(32))),
        )

    @property
    def address(self) -> str:
        """Where the persister of this node listens."""
        return self.addresses[self.node]

    @property
    def text(self) -> str:
        """The line that is logged about it before training."""
        partners = ", ".join(self.hosts[k] for k in self.known.partners[self.node])
        shared = [k for k in self.known.partners[self.node] if self.known.domains[k] == self.known.domains[self.node]]
        same = "; WARNING: in the same failure domain" if shared else ""
        return (
            f"replicas: {self.sent_bytes / 1e6:.1f} MB of each snapshot of this node go to {partners}{same}; "
            f"replicas of other nodes take up to {self.kept_bytes / 1e6:.1f} MB of this node's memory"
        )

    def meet(self, directory: JobDirectory, outcome: RestoreOutcome) -> None:
        """Write what the persister of this node has to know. Collective.

        Args:
            directory: The job's directory on this node.
            outcome: The restore's outcome; it names the generation.
        """
        record, is_first = outcome.record, self.mates[0] == self.rank
        private.write_record(
            records.rows_path(directory, self.rank), ReplicaRows.of(record.number, self.keys, self.masks)
        )
        port = _listening_port(directory, self.address) if is_first else 0
        ports = collectives.all_gather(port)
        nodes = range(len(self.addresses))
        first = [self.known.node_of.index(node) for node in nodes]
        silent = [self.hosts[node] for node in nodes if not ports[first[node]]]
        if silent:
            notice(
                _logger, "the persisters of %s do not listen: nothing is replicated to them", ", ".join(silent),
                is_shown=self.rank == 0,
            )  # fmt: skip
        if not is_first:
            return
        parent = record.parent if record.parent != BEGINNING else None
        session = ReplicaSession(
            generation=record.number,
            node=self.node,
            addresses=tuple(f"{self.addresses[node]} {ports[first[node]]}" for node in nodes),
            domains=tuple(self.known.domains),
            ranks=tuple(
                " ".join(str(r) for r, node in enumerate(self.known.node_of) if node == which) for which in nodes
            ),
            replicas=self.known.replicas,
            every=self.settings.replicate_every,
            rate=self.settings.replicate_rate or 0,
            restored=parent if outcome.superseded is None else None,
            superseded=outcome.superseded,
            secret={"key": self.secret},
            hosts=tuple(self.hosts),
        )
        private.write_record(records.session_path(directory), session)
        directory.notify(self.rank)


def _masks(group: HostGroup, known: ReplicaMap, keys: Keys) -> Masks:
    """Ask the rank that each key belongs to where this rank's row goes. Collective."""
    owners = owner_of(keys, group.ranks)
    asked = group.all_to_all([[keys[owners == owner].astype("<u8").tobytes()] for owner in range(group.ranks)])
    board = {rank: np.frombuffer(part, "<u8").astype(np.uint64) for rank, part in enumerate(asked)}
    answers = known.masks(board)
    heard = group.all_to_all([[answers[rank].tobytes()] for rank in range(group.ranks)])
    masks = np.zeros(len(keys), np.uint8)
    for owner, part in enumerate(heard):
        masks[owners == owner] = np.frombuffer(part, np.uint8)
    return masks


def _slot_bytes(table: ShardTable, rows: np.ndarray) -> int:
    return replica_bytes(table, rows) + 2 * _MANIFEST_BYTES * (len(rows) + 50) + 3 * 4096 if len(rows) else 0


def _kept_bytes(directory: JobDirectory) -> int:
    return sum(path.stat().st_blocks * 512 for path in directory.replica_segments())


def _rank() -> int:
    import torch.distributed as dist

    return int(dist.get_rank())


def _own_address() -> str:
    return env.FLASHCKPT_REPLICA_ADDRESS or own_address(env.MASTER_ADDR)


def _address(found: Sequence[str], node: int) -> str:
    """Return the address of this node: where it has found only a loopback one, that from which it reaches another node."""
    others = [address for address in found if _is_reachable(address)]
    mine = found[node]
    if _is_reachable(mine) or not others:
        return mine or "127.0.0.1"
    return own_address(others[0]) or mine


def _gathered(address: str, first: Sequence[int]) -> list[str]:
    everything = collectives.all_gather(address)
    return [everything[rank] for rank in first]


def _listening_port(directory: JobDirectory, address: str) -> int:
    """Return the port on which this node's persister listens, once it does; 0 where it does not in time."""
    end = time.monotonic() + LISTENS_S
    while time.monotonic() < end:
        with contextlib.suppress(FlashckptError):
            found = records.read_endpoint(directory)
            if found is not None and found.address == address and directory.daemon_alive():
                return found.port
        time.sleep(0.01)
    return 0
