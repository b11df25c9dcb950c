"""Leaves the tokenizer of a run on its root: by rank 0, on a thread beside the first steps. An error is one line of the log."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from flashckpt.environment import env
from flashckpt.errors import FlashckptError
from flashckpt.storage.factory import is_process_local, open_in_rank
from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.train.hooks import HookedRun, TrainerHooks

if TYPE_CHECKING:
    from flashckpt.trainer.parallel.apply import Parallel

logger = logging.getLogger(__name__)
_MOST_S = 60.0
"""What the end of a run waits for its tokenizer to be written."""


def keep_of_run(config: RunConfig) -> None:
    """Write the tokenizer of a run beside its checkpoints; a run on bytes needs none."""
    from flashckpt.trainer.hub.root_files import keep
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
