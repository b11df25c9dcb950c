"""The tokenizer of a run beside its checkpoints: `tokenizers/DIGEST/NAME` on the root, once, so that the root is enough anywhere. Torch-free.

Written by rank 0 on a thread when a run begins. A run trains as well without it: an error is one line of the log.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from flashckpt.environment import env
from flashckpt.errors import FlashckptError
from flashckpt.storage.factory import is_process_local, open_in_rank
from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.train.hooks import HookedRun, TrainerHooks

if TYPE_CHECKING:
    from flashckpt.storage.store import Store
    from flashckpt.trainer.parallel.apply import Parallel

logger = logging.getLogger(__name__)
FOLDER = "tokenizers"
_MOST_S = 60.0
"""What the end of a run waits for its tokenizer to be written."""


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
        _, digest, name = info.key.split("/", 2)
        found.setdefault(digest, []).append((info.mtime, name))
    for digest, named in sorted(found.items(), key=lambda one: max(one[1]), reverse=True):
        files = {name: store.get(f"{FOLDER}/{digest}/{name}") for _, name in named}
        if digest_of_files(files) == digest:
            return files
        logger.warning("%s/%s/%s is not whole, or was changed: it is not used", store.url, FOLDER, digest)
    return {}


def keep_of_run(config: RunConfig) -> None:
    """Write the tokenizer of a run beside its checkpoints; a run on bytes needs none."""
    from flashckpt.trainer.hub.tokenizer_files import files_of_run

    settings = config.checkpoint
    try:
        if files := files_of_run(config):
            keep(open_in_rank(settings.root, settings.storage_options), files)
    except (FlashckptError, OSError) as error:
        logger.warning(
            "the tokenizer was not written beside the checkpoints, so that elsewhere `generate` needs --tokenizer: %s",
            str(error).partition("\n")[0],
        )


class TokenizerHooks(TrainerHooks):
    """Writes the tokenizer once, beside the first steps; see TrainerHooks."""

    def __init__(self, run: HookedRun) -> None:
        super().__init__(run)
        self._thread: threading.Thread | None = None

    def opened(self, config: RunConfig, parallel: Parallel, after: int) -> None:  # noqa: ARG002 -- see TrainerHooks
        """See TrainerHooks."""
        root = config.checkpoint.root
        if self._thread is None and env.RANK == 0 and root and not is_process_local(root):
            self._thread = threading.Thread(target=keep_of_run, args=(config,), name="tokenizer", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """See TrainerHooks."""
        if self._thread is not None:
            self._thread.join(_MOST_S)
