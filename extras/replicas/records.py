"""The records of replication in a job directory: where the persisters listen, who the nodes are, which rows go where."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.replicate.partners import partner_map
from flashckpt.replicate.replica_rows import Keys, Masks
from flashckpt.shm import private
from flashckpt.shm.job_directory import JobDirectory


@dataclass(frozen=True, kw_only=True)
class NodeEndpoint:
    """Where the persister of this node listens; port 0 where it cannot."""

    address: str = ""
    port: int = 0
    pid: int = 0
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class ReplicaSession:
    """The nodes of a generation, the same on all but for `node`; written by the first rank of each.

    Attributes:
        generation: Its number.
        node: This one's index.
        addresses: "host port" of each node's persister; "" for one that does not listen.
        domains: Failure domain of each node.
        ranks: Ranks of each node, as text: "0 1 2".
        replicas: Partners of each node.
        every: Steps whose snapshots are replicated are multiples of this.
        rate: Bytes per second that a node sends to a partner; 0 for no limit.
        restored: The snapshot in memory that the generation was restored from.
        superseded: The one on storage.
        secret: What the persisters prove to each other to know; {"key": bytes}.
        hosts: Names of the nodes, for people; none where they are not known.
    """

    generation: int
    node: int
    addresses: tuple[str, ...]
    domains: tuple[str, ...]
    ranks: tuple[str, ...]
    replicas: int
    every: int = 1
    rate: int = 0
    restored: SnapshotId | None = None
    superseded: SnapshotId | None = None
    secret: dict[str, Any] = field(default_factory=dict, repr=False)
    hosts: tuple[str, ...] = ()

    @cached_property
    def partners(self) -> tuple[tuple[int, ...], ...]:
        """Of each node."""
        return partner_map(self.domains, self.replicas)

    def ranks_of(self, node: int) -> tuple[int, ...]:
        """Return the ranks of a node."""
        return tuple(map(int, self.ranks[node].split()))

    def name(self, node: int) -> str:
        """Return the name of a node, for people."""
        return self.hosts[node] if node < len(self.hosts) else f"node {node}"

    def place(self, node: int) -> tuple[str, int] | None:
        """Return address and port of a node's persister; None where it does not listen."""
        host, _, port = self.addresses[node].rpartition(" ")
        return (host, int(port)) if host and port.isdigit() and int(port) else None

    @property
    def key(self) -> bytes:
        """The secret."""
        found = self.secret.get("key", b"")
        return found if isinstance(found, bytes) else b""


@dataclass(frozen=True, kw_only=True)
class ReplicaRows:
    """Which partners the rows of one rank go to.

    Attributes:
        generation: In which this holds.
        rows: {"keys": u64 of each row, "masks": u8 of each row}, little-endian.
    """

    generation: int
    rows: dict[str, Any]

    @classmethod
    def of(cls, generation: int, keys: Keys, masks: Masks) -> ReplicaRows:
        """Return the record."""
        return cls(generation=generation, rows={"keys": keys.astype("<u8").tobytes(), "masks": masks.tobytes()})

    @property
    def known(self) -> tuple[Keys, Masks]:
        """Keys and masks; ValueError where they do not fit together."""
        keys = np.frombuffer(self.rows.get("keys", b""), "<u8").astype(np.uint64)
        masks = np.frombuffer(self.rows.get("masks", b""), np.uint8)
        if len(keys) != len(masks):
            raise ValueError("keys and masks of different lengths")
        return keys, masks


def endpoint_path(directory: JobDirectory) -> Path:
    """Return where the persister says where it listens."""
    return directory.replicas_path / "endpoint.msgpack"


def session_path(directory: JobDirectory) -> Path:
    """Return where the session is."""
    return directory.replicas_path / "session.msgpack"


def rows_path(directory: JobDirectory, rank: int) -> Path:
    """Return where the rows of a rank are."""
    return directory.replicas_path / f"rows-r{rank:05d}.msgpack"


def read_endpoint(directory: JobDirectory) -> NodeEndpoint | None:
    """Return where the persister listens; None where it has not said so. Raises DamagedError."""
    return private.read_record(endpoint_path(directory), NodeEndpoint)


def read_session(directory: JobDirectory) -> ReplicaSession | None:
    """Return the session; None where there is none. Raises DamagedError."""
    return private.read_record(session_path(directory), ReplicaSession)


def read_rows(directory: JobDirectory, rank: int) -> ReplicaRows | None:
    """Return the rows of a rank; None where there are none. Raises DamagedError."""
    return private.read_record(rows_path(directory, rank), ReplicaRows)
