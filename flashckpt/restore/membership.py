"""The first exchange of a restore, in which every rank proves that it has the key of the job. All ranks together.

gloo and NCCL admit whoever reaches them. So nothing of the state is sent, and nothing that arrives is used, before each
rank has signed what all ranks have said: their numbers, and a number drawn by each for this restore alone. What passes
after that is not signed.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Sequence
from typing import Any

import msgpack

from flashckpt import collectives
from flashckpt.errors import ConfigError

_NONCE = 32
_NONE = bytes(_NONCE)
"""In place of a drawn number, where a rank has no key."""


def gathered(mine: Any, key: bytes) -> list[Any]:
    """Return every rank's value (msgpack types), once all ranks have proved that they have the key. Collective.

    Where no rank has one, nothing is proved, and nothing more is exchanged.

    Raises:
        ConfigError: A rank does not have this rank's key. On every rank that has it, or has none.
    """
    raw = collectives.all_gather_bytes((os.urandom(_NONCE) if key else _NONE) + msgpack.packb(mine))
    if any(part[:_NONCE] != _NONE for part in raw):
        _verify(raw, key)
    return [msgpack.unpackb(part[_NONCE:], strict_map_key=False) for part in raw]


def _verify(raw: Sequence[bytes], key: bytes) -> None:
    """Prove to all ranks that this one has the key, and have them prove it. Before anything of theirs is decoded."""
    spoken = b"".join(hashlib.sha256(part).digest() for part in raw)
    proofs = collectives.all_gather_bytes(proof(key, collectives.rank(), spoken))
    expected = [proof(key, rank, spoken) for rank in range(len(raw))]
    strangers = [r for r, theirs in enumerate(proofs) if not key or not hmac.compare_digest(theirs, expected[r])]
    if strangers:
        raise _refusal(strangers, key)


def proof(key: bytes, rank: int, spoken: bytes) -> bytes:
    """Return what proves that a rank has the key and heard the same as the others; b"" without a key."""
    return hmac.digest(key, b"restore %d " % rank + spoken, "sha256") if key else b""


def _refusal(strangers: Sequence[int], key: bytes) -> ConfigError:
    state = "Nothing was restored, and no state was sent."
    remedy = "give all nodes the same FLASHCKPT_JOB_SECRET, and close their ports to others"
    if not key:
        return ConfigError("this rank has no job secret, and other ranks have one", state=state, remedy=remedy)
    ranks = ", ".join(map(str, strangers[:8])) + (" and others" if len(strangers) > 8 else "")
    return ConfigError(
        f"not every rank has proved that it belongs to this job: rank {ranks} did not",
        expected="every rank with the key that is made of the job secret",
        state=state,
        remedy=remedy,
    )
