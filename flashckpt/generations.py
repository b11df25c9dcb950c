"""Claims of generations on the root: who may persist. Torch-free; one small object per generation, never changed.

`generations/000004` is created by `put_if_absent`, so one life of the worker group owns a number. Its
token tells our own claim from another's of the same number; a newer claim fences every older writer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgpack

from flashckpt.errors import DamagedError, FencedError, FormatVersionError, ObjectMissingError
from flashckpt.faults import crash_point
from flashckpt.store import Store

PREFIX = "generations/"
_MAJOR = 1
_KEY = re.compile(r"^generations/(\d{6,})$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One life of the worker group, as the root knows it.

    Args:
        generation: Its number.
        token: Random text that only this life knows.
        parent: (generation, step) it was restored from; None for a fresh start.
        world_size: Ranks in it.
        job: Job id.
    """

    generation: int
    token: str
    parent: tuple[int, int] | None
    world_size: int
    job: str

    @property
    def key(self) -> str:
        """Its object on the root."""
        return f"{PREFIX}{self.generation:06d}"


def encode_claim(claim: Claim) -> bytes:
    """Return the claim as msgpack."""
    fields = {
        "format": _MAJOR,
        "generation": claim.generation,
        "token": claim.token,
        "parent": None if claim.parent is None else list(claim.parent),
        "world_size": claim.world_size,
        "job": claim.job,
    }
    return bytes(msgpack.packb(fields))


def decode_claim(data: bytes, key: str) -> Claim:
    """Return the claim in `data`; DamagedError or FormatVersionError names `key`."""
    try:
        fields = msgpack.unpackb(data)
        if fields["format"] != _MAJOR:
            raise FormatVersionError(
                f"The root was written by a newer flashckpt: {key}",
                found=f"format {fields['format']}",
                expected=f"format {_MAJOR}",
                remedy="use the flashckpt release that wrote it, or a newer one",
            )
        parent = fields["parent"]
        return Claim(
            generation=int(fields["generation"]),
            token=str(fields["token"]),
            parent=None if parent is None else (int(parent[0]), int(parent[1])),
            world_size=int(fields["world_size"]),
            job=str(fields["job"]),
        )
    except (ValueError, KeyError, TypeError, IndexError, msgpack.UnpackException) as error:
        raise DamagedError(f"The claim of a generation is damaged: {key}", found=str(error)) from error


def numbers(store: Store) -> list[int]:
    """Return the generations claimed on the root, ascending (one listing)."""
    return sorted(int(match[1]) for info in store.list(PREFIX) if (match := _KEY.match(info.key)))


def read_claim(store: Store, generation: int) -> Claim | None:
    """Return the claim of one generation, None where there is none."""
    key = f"{PREFIX}{generation:06d}"
    try:
        return decode_claim(store.get(key), key)
    except ObjectMissingError:
        return None


def read_claims(store: Store) -> list[Claim]:
    """Return all claims, ascending: the lineage of the root (one listing and one small read each)."""
    found = [read_claim(store, number) for number in numbers(store)]
    return [claim for claim in found if claim is not None]


def try_claim(store: Store, claim: Claim) -> bool:
    """Claim `claim.generation`; True if it is ours now or was already (same token), False if another's."""
    crash_point("generation.before-claim")
    done = store.put_if_absent(claim.key, encode_claim(claim))
    crash_point("generation.after-claim")
    if done:
        return True
    held = read_claim(store, claim.generation)
    return held is not None and held.token == claim.token


def check_fence(store: Store, claim: Claim, *, known: Sequence[int] | None = None) -> None:
    """Raise unless the root's newest generation is `claim`: claim it where it is free, before anything is persisted.

    Args:
        store: The root.
        claim: This life of the worker group.
        known: Numbers on the root, where the caller has just listed them.

    Raises:
        FencedError: A newer generation is there, or this number belongs to another life.
    """
    found = numbers(store) if known is None else list(known)
    newest = max(found, default=0)
    if newest > claim.generation:
        raise _fenced(claim, f"generation {newest} on {store.url}")
    if not try_claim(store, claim):
        raise _fenced(claim, f"generation {claim.generation} on {store.url} was claimed by another run")


def _fenced(claim: Claim, found: str) -> FencedError:
    return FencedError(
        f"Generation {claim.generation} of job {claim.job!r} may not write to its root any more",
        found=found,
        expected=f"generation {claim.generation} to be the newest, claimed with this run's token",
        state="Nothing was persisted; snapshots in memory are kept.",
        remedy="if two runs share this root, stop one of them or give it another root",
    )
