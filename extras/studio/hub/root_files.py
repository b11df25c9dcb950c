"""The tokenizer of a run beside its checkpoints: `tokenizers/DIGEST/NAME` on the root, once, so that the root is enough anywhere. Torch-free.

A run trains as well without it.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashckpt.storage.store import Store

logger = logging.getLogger(__name__)
FOLDER = "tokenizers"


def digest_of_files(files: Mapping[str, bytes]) -> str:
    """Return the digest of files by name."""
    found = hashlib.blake2b(digest_size=16)
    for name, content in sorted(files.items()):
        found.update(f"{name} {len(content)}\n".encode())
        found.update(content)
    return found.hexdigest()


def keep(store: Store, files: Mapping[str, bytes]) -> None:
    """Write files beside the checkpoints of a root, unless they are there."""
    place = f"{FOLDER}/{digest_of_files(files)}"
    there = {info.key: info.nbytes for info in store.list(f"{place}/")}
    for name, content in files.items():
        if there.get(f"{place}/{name}") != len(content):
            store.put(f"{place}/{name}", content)


def kept(store: Store) -> dict[str, bytes]:
    """Return the files that a run left beside its checkpoints, of several the newest whole ones; {} where none did."""
    found: dict[str, list[tuple[float, str]]] = {}
    for info in store.list(f"{FOLDER}/"):
        _, digest, name = (*info.key.split("/", 2), "")[:3]
        if name:  # else somebody else put it there
            found.setdefault(digest, []).append((info.mtime, name))
    for digest, named in sorted(found.items(), key=lambda one: max(one[1]), reverse=True):
        files = {name: store.get(f"{FOLDER}/{digest}/{name}") for _, name in named}
        if digest_of_files(files) == digest:
            return files
        logger.warning("%s/%s/%s is not whole, or was changed: it is not used", store.url, FOLDER, digest)
    return {}
