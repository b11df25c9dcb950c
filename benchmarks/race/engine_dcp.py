"""torch.distributed.checkpoint: `async_save` of a Stateful, one save in flight, as in its recipe."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.stateful import Stateful

from race import engine_none, problem


class State(Stateful):
    """Model and optimizer by the functions that the recipe names."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def state_dict(self) -> dict[str, Any]:
        """Return both."""
        model, optimizer = get_state_dict(self.engine.model, self.engine.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set both."""
        set_state_dict(
            self.engine.model,
            self.engine.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


class Engine(engine_none.Engine):
    """Asynchronous."""

    def __init__(self, *words: Any) -> None:
        super().__init__(*words)
        self.group = dist.new_group(backend="gloo", timeout=problem.TIMEOUT)
        self.future: Any = None

    def restore(self) -> int:
        """Load the newest folder that is whole: its .metadata is written last."""
        if not (found := engine_none.folders("step_*", ".metadata")):
            return 0
        state = {"app": State(self), **self.position(0)}
        load(state, checkpoint_id=found[-1])
        return self.reposition(state)

    def save(self, step: int) -> None:
        """Wait for the save before this one, then begin."""
        if engine_none.due(step):
            self.finish()
            state = {"app": State(self), **self.position(step)}
            self.future = async_save(state, checkpoint_id=problem.FOLDER / f"step_{step}", process_group=self.group)

    def finish(self) -> None:
        """Wait for the last save."""
        if self.future is not None:
            self.future.result()
            engine_none.keep_two("step_*")
