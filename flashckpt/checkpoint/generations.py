"""Claims of generations on the root, and the fence: only the newest generation of a root may persist there. Torch-free.

`try_claim` creates one small object per life of the worker group. Its token
tells our own claim from another's of the same number; a newer claim fences every older writer.
"""

from __future__ import annotations

from flashckpt.checkpoint.catalog import GENERATIONS, claim_generation, read_generations
from flashckpt.checkpoint.catalog import GenerationClaim as Claim
from flashckpt.errors import FencedError
from flashckpt.storage.store import Store

__all__ = ["Claim", "check_fence", "read_claims", "try_claim"]

read_claims = read_generations
try_claim = claim_generation


def check_fence(store: Store, claim: Claim) -> None:
    """Raise unless the root's newest generation is `claim`; claim it where it is free, before anything is persisted.

    Args:
        store: The root.
        claim: This life of the worker group.

    Raises:
        FencedError: A newer generation is there, or this number belongs to another life.
    """
    numbers = [int(name) for info in store.list(GENERATIONS) if (name := info.key.rpartition("/")[2]).isdigit()]
    newest = max(numbers, default=0)
    if newest > claim.generation:
        raise _fenced(claim, f"generation {newest} was claimed on {store.url}")
    if not try_claim(store, claim):
        raise _fenced(claim, f"generation {claim.generation} of {store.url} belongs to another run")


def _fenced(claim: Claim, found: str) -> FencedError:
    return FencedError(
        f"Generation {claim.generation} may not write to its root any more",
        found=found,
        expected=f"generation {claim.generation} to be the newest, claimed with this run's token",
        state="Nothing was persisted; snapshots in memory are kept.",
        remedy="if two runs share this root, stop one of them or give it another root",
    )
