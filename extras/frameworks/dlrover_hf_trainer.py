"""DLRover's Trainer of Hugging Face: `FlashCkptTrainer`, with its call shape.

    from flashckpt.integrations.dlrover_hf_trainer import FlashCkptTrainer  # was: from ...torch.flash_checkpoint.hf_trainer

    trainer = FlashCkptTrainer(model=model, args=args, train_dataset=data)
    trainer.train(resume_from_checkpoint=trainer.get_last_checkpoint())
    trainer.wait_latest_checkpoint()

Checkpoints are in the root OUTPUT_DIR/flashckpt, not in folders `checkpoint-N`. Needs transformers 5.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from transformers import Trainer, TrainingArguments

from flashckpt.errors import ConfigError
from flashckpt.integrations.transformers import FlashCheckpoint

_ARGS_AT = 1
"""The position of `args` among the arguments of Trainer."""


class FlashCkptTrainer(Trainer):  # type: ignore[misc]  # transformers is not there when types are checked
    """A Trainer that keeps a checkpoint where Trainer would: by `save_strategy`, `save_steps` and `save_total_limit`.

    Attributes:
        flash: The callback.
    """

    def __init__(
        self,
        *given: Any,
        args: TrainingArguments | None = None,
        callbacks: Sequence[Any] | None = None,
        flash: dict[str, Any] | None = None,
        **named: Any,
    ) -> None:
        own = args if args is not None else given[_ARGS_AT] if len(given) > _ARGS_AT else None
        settings = TrainingArguments() if own is None else own
        for name, value in (
            ("load_best_model_at_end", settings.load_best_model_at_end),
            ("save_strategy", settings.save_strategy),
        ):
            if value is True or value == "best":
                raise ConfigError(
                    f"the best model is not kept by FlashCkptTrainer ({name})",
                    found=f"{name}={value}",
                    expected="the newest checkpoints, by save_steps or epochs",
                    remedy="Trainer with the callback FlashCheckpoint beside it: Trainer then writes its own folders",
                )
        every = max(1, int(settings.save_steps)) if settings.save_strategy == "steps" else 1
        options = {"snapshot_every": every, "persist_every": None, "keep_last": settings.save_total_limit}
        root = os.path.join(settings.output_dir, "flashckpt")  # noqa: PTH118 -- may be a URL
        self.flash = FlashCheckpoint(root, persists_saves=True, **options | (flash or {}))
        if own is None or args is not None:
            named["args"] = settings
        super().__init__(*given, callbacks=[*(callbacks or ()), self.flash], **named)

    def _save_checkpoint(self, *given: Any, **named: Any) -> None:
        """Write no folder: the callback has taken the state behind this step already."""

    def get_last_checkpoint(self) -> bool:
        """Return False, for `resume_from_checkpoint`: training continues at the newest state anyway."""
        return False

    def wait_latest_checkpoint(self, timeout: float = 1800) -> None:
        """Return when the last checkpoint is committed; behind `train()` it is.

        Args:
            timeout: Seconds.

        Raises:
            PersistError: It was not in `timeout` seconds, or storage failed.
        """
        if self.flash.is_training:
            self.flash.checkpointer.wait(timeout)


__all__ = ["FlashCkptTrainer"]
