"""A rank of flashckpt's trainer for benchmarks/trainer_speed.py: `python trainer_speed_ours.py '{"model": {...}, ...}'`.

The loop is the trainer's own, with its reporter; only the beginning of each step waits for its turn.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import TYPE_CHECKING

from trainer_speed_turns import Over, Turns

from flashckpt.trainer.config import from_values
from flashckpt.trainer.parallel.distributed import process_group
from flashckpt.trainer.train.loop import Trainer, prepare

if TYPE_CHECKING:
    from flashckpt.trainer.train.metrics import StepRecord


class Paced(Trainer):
    """A trainer whose steps wait for their turn."""

    turns: Turns

    def one_step(self) -> StepRecord:
        """Train a step, in its turn."""
        self.turns.step_begins()
        return super().one_step()


def main() -> None:
    turns = Turns()
    logging.basicConfig(level=logging.INFO)
    config = from_values(json.loads(sys.argv[1]))
    layout = prepare(config, int(os.environ["WORLD_SIZE"]))
    with process_group(config) as device:
        trainer = Paced(config, layout, device)
        trainer.turns = turns
        parameters = sum(parameter.numel() for parameter in trainer.parallel.parameters())
        print(f"{layout.describe()}; {parameters} parameters, whole tensors", flush=True)
        try:
            trainer.run()
        except Over:
            if trainer.ckpt is not None:
                trainer.ckpt.close()


if __name__ == "__main__":
    main()
