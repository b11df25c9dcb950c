"""torch_checkpointing 0.1.1: its tutorial's loop with its lock, and the settings that its troubleshooting page gives for a CPU."""

from __future__ import annotations

import importlib
from typing import Any

from race import engine_none, problem


class Engine(engine_none.Engine):
    """Asynchronous; every rank writes a separate file."""

    def __init__(self, *words: Any) -> None:
        super().__init__(*words)
        top = importlib.import_module("torch_checkpointing")
        config = importlib.import_module("torch_checkpointing.config")
        staging = importlib.import_module("torch_checkpointing.staging")
        storage = importlib.import_module("torch_checkpointing.storage.filesystem")
        stager = staging.CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
        self.manager = top.CheckpointManager(
            top.CheckpointManager.Config(
                storage_config=storage.LocalFileSystemStorageConfig(use_direct_io=False),
                save=config.AsyncCheckpointSaverConfig(staging_config=stager),
            )
        )

    def restore(self) -> int:
        """Load the folder with the highest number, as the tutorial does."""
        if not (found := engine_none.folders("step_*")):
            return 0
        into = {"model": self.model.state_dict(), "optimizer": None, **self.position(0)}
        state = self.manager.load(str(found[-1]), into=into)
        self.optimizer.load_state_dict(state["optimizer"])
        return self.reposition(state)

    def update(self) -> Any:
        """Return its lock: without it a save mixes two steps."""
        return self.manager.lock()

    def save(self, step: int) -> None:
        """Begin a save; it waits for the one before itself."""
        if engine_none.due(step):
            engine_none.keep_two("step_*")
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), **self.position(step)}
            self.manager.save(str(problem.FOLDER / f"step_{step}"), state)

    def finish(self) -> None:
        """Wait for the last save."""
        self.manager.close()
