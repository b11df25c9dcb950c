"""Proposals of the nodes as small objects on the root: what each of them would persist next. Torch-free.

intents/000003-000000120               the intent (flashckpt.checkpoint.intents)
intents/000003-000000120.abandoned     it will never be committed
intents/ready-000003/r00008.000000004  what the node whose lowest rank is 8 proposes, the fifth time
"""

from __future__ import annotations

from flashckpt.checkpoint.intents import INTENTS
from flashckpt.checkpoint.root_records import explaining, open_record, parallel
from flashckpt.core.intent import NodeProposal
from flashckpt.core.records import pack, seal
from flashckpt.errors import ObjectMissingError
from flashckpt.storage.store import Store

READY = f"{INTENTS}ready-"


class Proposals:
    """The proposals of the nodes: each proposal is another object, so that one that was read need not be read again.

    A node numbers its own; its newest counts, and it removes those before. An object without a number is from before.
    """

    def __init__(self) -> None:
        self._read: dict[str, NodeProposal] = {}

    def read(self, store: Store, generation: int, *, of_all: bool = True) -> list[NodeProposal]:
        """Return the newest proposals in one generation: a listing, and one request for each new one.

        Args:
            store: The root.
            generation: Which one.
            of_all: Read those of all nodes; else only those of rank 0's node, whose listing does not grow with the nodes.
        """
        newest = [keys[-1] for keys in _listed(store, generation, None if of_all else 0).values()]
        new = [key for key in newest if key not in self._read]
        found = dict(zip(new, parallel(lambda key: _get(store, key), new), strict=True))
        self._read = {key: one for key in newest if (one := self._read.get(key) or found.get(key)) is not None}
        return list(self._read.values())

    def publish(self, store: Store, generation: int, proposal: NodeProposal) -> None:
        """Put this node's proposal, named by its lowest rank, and remove what it proposed before."""
        node = _node_key(generation, first := min(proposal.ranks))
        before = _listed(store, generation, first).get(
            node, []
        )  # each time: a number of somebody else would outweigh ours
        key = f"{node}.{_number(before[-1]) + 1 if before else 0:09d}"
        store.put(key, encode_proposal(proposal))
        store.delete_many(before)


def _listed(store: Store, generation: int, first: int | None) -> dict[str, list[str]]:
    """Return the keys of each node's proposals, oldest first; with `first` only those of the node of that lowest rank."""
    keys: dict[str, list[str]] = {}
    prefix = _ready_prefix(generation) if first is None else _node_key(generation, first)
    for info in store.list(prefix):  # sorted: by number
        keys.setdefault(info.key.partition(".")[0], []).append(info.key)
    return keys


def _node_key(generation: int, first: int) -> str:
    return f"{_ready_prefix(generation)}r{first:05d}"


def _get(store: Store, key: str) -> NodeProposal | None:
    try:
        return decode_proposal(store.get(key), key, store.url)
    except ObjectMissingError:
        return None  # a newer one has taken its place meanwhile


def _number(key: str) -> int:
    number = key.rpartition(".")[2]
    return int(number) if number.isdigit() else -1


def clear_proposals(store: Store, below: int) -> None:
    """Remove the proposals of generations before `below`."""
    numbers = {info.key: info.key[len(READY) :].partition("/")[0] for info in store.list(READY)}
    store.delete_many([key for key, number in numbers.items() if number.isdigit() and int(number) < below])


def _ready_prefix(generation: int) -> str:
    return f"{READY}{generation:06d}/"


def encode_proposal(proposal: NodeProposal) -> bytes:
    """Return the object of a proposal."""
    return seal(pack(proposal))


def decode_proposal(raw: bytes, key: str, url: str) -> NodeProposal:
    """Return the record in `raw`, which was read from `key` of the root `url`.

    Raises:
        DamagedError, FormatVersionError: It cannot be used; the message says how to continue.
    """
    with explaining(
        f"the proposal {key} of {url} is damaged",
        state="Nothing was persisted because of it; committed checkpoints are as they were.",
        remedy=f"none is needed while its node runs: it writes it again; else delete the object {key}",
    ):
        proposal = open_record(NodeProposal, raw, key)
        if not proposal.ranks:
            raise ValueError("no ranks")
        return proposal
