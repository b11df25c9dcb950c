"""Proposals of the nodes as small objects on the root: what each of them would persist next. Torch-free.

intents/000003-000000120             the intent (flashckpt.checkpoint.intents)
intents/000003-000000120.abandoned   it will never be committed
intents/ready-000003/r00008          what the node whose lowest rank is 8 proposes
"""

from __future__ import annotations

from flashckpt.checkpoint.intents import INTENTS
from flashckpt.checkpoint.root_records import explaining, open_record
from flashckpt.core.intent import NodeProposal
from flashckpt.core.records import pack, seal
from flashckpt.errors import ObjectMissingError
from flashckpt.storage.store import Store

READY = f"{INTENTS}ready-"


def publish_proposal(store: Store, generation: int, proposal: NodeProposal) -> None:
    """Put this node's proposal, named by its lowest rank."""
    store.put(f"{_ready_prefix(generation)}r{min(proposal.ranks):05d}", encode_proposal(proposal))


def read_proposals(store: Store, generation: int) -> list[NodeProposal]:
    """Return the proposals of all nodes in one generation."""
    found = []
    for info in store.list(_ready_prefix(generation)):
        try:
            found.append(decode_proposal(store.get(info.key), info.key, store.url))
        except ObjectMissingError:
            continue
    return found


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
