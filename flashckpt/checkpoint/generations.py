"""Claims of generations on the root, and the fence: only the newest generation of a root may persist there. Torch-free.

A claim is one small object per generation, created once. Its token tells our own claim from another's of the same
number; a newer claim fences every older writer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from flashckpt.checkpoint.root_records import explaining, open_record, parallel, parse_prefix
from flashckpt.core.digest import mark_of
from flashckpt.core.lineage import BEGINNING, Generation
from flashckpt.core.records import is_sealed, pack, seal
from flashckpt.errors import FencedError, ObjectMissingError, RootError
from flashckpt.faults import crash_point
from flashckpt.storage.store import Store

GENERATIONS = "generations/"
_LOCAL = ("claimed", "line")
"""Fields of a generation that only the job directory holds."""


def claim_generation(store: Store, claim: Generation) -> bool:
    """Claim a generation's number on the root; return whether it is ours (also when claimed by an earlier try).

    Exactly one of several claimers wins. On a store without conditional writes the claim is written,
    then read back after a pause; call `owns_generation` again before anything is persisted there.
    """
    crash_point("generation.before-claim")
    won = store.put_if_absent(_claim_key(claim.number), encode_claim(claim))
    if not won:  # an answer may have been lost: the token tells whether the object is ours
        won = owns_generation(store, claim)
    if won:
        crash_point("generation.after-claim")
    return won


def owns_generation(store: Store, claim: Generation) -> bool:
    """Return whether the claim on the root carries this claim's token."""
    try:
        return _read_claim(store, _claim_key(claim.number)).token == claim.token
    except ObjectMissingError:
        return False


def claimed_token(store: Store, number: int) -> str:
    """Return the token of the claim on a number; "" where nobody has claimed it."""
    try:
        return _read_claim(store, _claim_key(number)).token
    except ObjectMissingError:
        return ""


def read_generations(store: Store) -> list[Generation]:
    """Return all claims of a root, lowest number first; a claim that cannot be read is an error (never skipped)."""
    keys = [info.key for info in store.list(GENERATIONS) if info.key.rpartition("/")[2].isdigit()]
    return sorted(parallel(lambda key: _read_claim(store, key), keys), key=lambda claim: claim.number)


def newest_claim(store: Store) -> int:
    """Return the highest number claimed on the root; 0 where there is none."""
    return max(_claimed(store), default=0)


def newest_generation(store: Store) -> int:
    """Return the highest number claimed on the root or used by a checkpoint folder; 0 where there is none."""
    used = [identity[0] for name in store.folders() if (identity := parse_prefix(name))]
    return max([*_claimed(store), *used], default=0)


def check_fence(
    store: Store, claim: Generation, *, on_missing: Callable[[], None] = lambda: None, is_known: bool = False
) -> None:
    """Raise unless the root's newest generation is `claim`; claim it where it is free, before anything is persisted.

    Args:
        store: The root.
        claim: This generation of the job.
        on_missing: Called before it is claimed where it is free.
        is_known: The claim on the root was found to be this one before, on a store where each is created once: then
            one listing is enough.

    Raises:
        FencedError: A newer generation is there, or this number belongs to another run.
    """
    claimed = {*_claimed(store)}
    if (newest := max(claimed, default=0)) > claim.number:
        raise _fenced(claim, f"generation {newest} was claimed on {store.url}")
    if claim.number not in claimed:
        on_missing()
        before = [number for number in claimed if claim.number - len(claim.line) <= number]
        if claim.is_overtaken({number: mark_of(claimed_token(store, number)) for number in before}):
            raise _fenced(
                claim, f"others have claimed generation {max(before)} on {store.url}, and gone on from before it"
            )
    elif is_known:
        return
    if not claim_generation(store, claim):
        raise _fenced(claim, f"generation {claim.number} of {store.url} belongs to another run")


class ReplacedRoot:
    """Notices that a generation which was claimed on the root is there no more."""

    def __init__(self) -> None:
        self._seen: tuple[int, int | None] | None = None
        self._was_refused = False

    def note(self, store: Store, claim: Generation) -> None:
        """Remember where the claim is."""
        self._seen = claim.number, _device(store)

    def refuse(self, store: Store, claim: Generation) -> None:
        """Raise RootError if the claim was there before: once where the root was emptied, else until it is there again."""
        seen = self._seen if self._seen is not None and self._seen[0] == claim.number else None
        if (seen is None and not claim.claimed) or owns_generation(
            store, claim
        ):  # its first claim, or a listing that lags
            return
        is_elsewhere = seen is not None and seen[1] != _device(store)
        if self._was_refused and not is_elsewhere:
            return
        self._was_refused = True
        raise RootError(
            f"{store.url} is no longer the root that this job has written to",
            found=f"no record of generation {claim.number}" + (", and another file system" if is_elsewhere else ""),
            expected="what the job wrote there when it began",
            state="Nothing was written now; snapshots in memory continue. The checkpoints committed there are missing.",
            remedy="mount it again: persisting then resumes automatically"
            if is_elsewhere
            else "nothing, if it was emptied on purpose: the next attempt writes there",
        )


def _device(store: Store) -> int | None:
    """Return the number of the file system that a directory is on; None for another store."""
    root: Path | None = getattr(store, "root", None)
    while root is not None and not root.exists() and root != root.parent:
        root = root.parent
    return None if root is None else root.stat().st_dev


def encode_claim(claim: Generation) -> bytes:
    """Return the object that claims a generation."""
    return seal(pack(claim, leave_out=_LOCAL))


def decode_claim(raw: bytes, key: str, url: str) -> Generation:
    """Return the claim in `raw`, which was read from `key` of the root `url`; one without a digest was written before 1.2.

    Raises:
        DamagedError, FormatVersionError: It cannot be used; the message says how to continue.
    """
    with explaining(
        f"the generation claim {key} of {url} is damaged",
        state="Nothing was chosen: without it, it is not known which checkpoints that generation rolled back.",
        remedy=f"restore the object {key} from a backup or an older version of it; if that generation rolled back "
        "nothing (it began where the one before it ended), delete it",
    ):
        claim = open_record(Generation, raw, key, leave_out=_LOCAL)
        if claim.number < 1 or _claim_key(claim.number) != key:
            raise ValueError(f"the claim of generation {claim.number}")
        # the beginning of everything is a parent only in a sealed claim: an unsealed one is older than `restore(fresh=True)`
        begins = claim.parent == BEGINNING and is_sealed(raw)
        if claim.parent is not None and not begins and not 0 < claim.parent[0] < claim.number:
            raise ValueError(f"generation {claim.number} restored from generation {claim.parent[0]}")
        return claim


def _read_claim(store: Store, key: str) -> Generation:
    return decode_claim(store.get(key), key, store.url)


def _claimed(store: Store) -> list[int]:
    """Return the numbers that are claimed, from the names alone."""
    return [int(name) for info in store.list(GENERATIONS) if (name := info.key.rpartition("/")[2]).isdigit()]


def _claim_key(generation: int) -> str:
    return f"{GENERATIONS}{generation:06d}"


def _fenced(claim: Generation, found: str) -> FencedError:
    return FencedError(
        f"generation {claim.number} may no longer write to its root",
        found=found,
        expected=f"generation {claim.number} to be the newest, claimed with this run's token",
        state="Nothing was persisted; snapshots in memory are kept.",
        remedy="if two runs share this root, stop one of them or give it another root",
    )
