"""DLRover's `FlashCkptTrainer` by its call shape: a Trainer with the callback of `flashckpt.integrations.transformers`.

    from flashckpt.integrations.dlrover_hf_trainer import FlashCkptTrainer
    # was: from dlrover.trainer.torch.flash_checkpoint.hf_trainer import FlashCkptTrainer

    trainer = FlashCkptTrainer(model=model, args=args, train_dataset=data)
    trainer.train(resume_from_checkpoint=trainer.get_last_checkpoint())
    trainer.wait_latest_checkpoint(1800)

Checkpoints are flashckpt's, in `flashckpt` below `args.output_dir`; no folder `checkpoint-N` is written. Needs transformers
5; DLRover itself is not needed.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, ClassVar

from transformers import Trainer

from flashckpt.errors import ConfigError
from flashckpt.integrations.transformers import FlashCheckpoint


class FlashCkptTrainer(Trainer):  # type: ignore[misc]  # transformers is not there when types are checked
    """A Trainer that restores automatically, from memory or storage, and persists every `save_steps`.

    Attributes:
        flash_options: Of `Checkpointer`, for a subclass to set: snapshot_every, replicate, root ...

    Raises:
        ConfigError: An argument asks for what only a folder `checkpoint-N` gives.
    """

    flash_options: ClassVar[dict[str, Any]] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(Trainer.__init__).bind(self, *args, **kwargs).arguments
        settings: Any = given.get("args")
        _refuse_folders(settings)
        own = {"root": Path(settings.output_dir) / "flashckpt", "persist_every": _every(settings)}
        if settings.save_total_limit:
            own["keep_last"] = settings.save_total_limit
        self.flash = FlashCheckpoint(**(own | self.flash_options))
        given["callbacks"] = [*(given.get("callbacks") or []), self.flash]
        super().__init__(**{name: value for name, value in given.items() if name != "self"})

    def train(self, resume_from_checkpoint: Any = None, **kwargs: Any) -> Any:
        """Train, from the newest state on.

        Raises:
            ConfigError: A folder is given: the state is on the root.
        """
        if isinstance(resume_from_checkpoint, str):
            raise ConfigError(
                "a FlashCkptTrainer does not resume from a folder of Trainer's",
                found=f"resume_from_checkpoint={resume_from_checkpoint!r}",
                expected="what get_last_checkpoint() returns, or nothing: it restores automatically",
                state="Nothing was loaded.",
                remedy="its weights: from_pretrained() with that folder, before",
            )
        return super().train(**kwargs)

    def get_last_checkpoint(self) -> bool:
        """Return False, as DLRover does without a checkpoint: there is nothing to hand to `train`."""
        return False

    def wait_latest_checkpoint(self, timeout: float = 1800, max_steps: int | None = None) -> None:
        """Return: `train` has waited for its last commit, and raised where it failed."""

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is to do: the callback has taken this step."""


def _every(settings: Any) -> int | None:
    return int(settings.save_steps) if settings.save_strategy == "steps" else None


def _refuse_folders(settings: Any) -> None:
    found = "no args" if settings is None else ""
    if not found and settings.save_strategy not in {"steps", "no"}:
        found = f"save_strategy={settings.save_strategy!s}"
    if not found and settings.save_strategy == "steps" and settings.save_steps < 1:
        found = f"save_steps={settings.save_steps}"
    if not found and settings.load_best_model_at_end:
        found = "load_best_model_at_end=True"
    if found:
        raise ConfigError(
            "checkpoints cannot be kept this way by a FlashCkptTrainer",
            found=found,
            expected="TrainingArguments with save_strategy='steps' and a whole number as save_steps, or 'no'",
            remedy="Trainer with flashckpt.integrations.transformers.FlashCheckpoint, which takes the rest",
        )


__all__ = ["FlashCkptTrainer"]
