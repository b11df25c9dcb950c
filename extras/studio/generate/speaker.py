"""A whole model on one device, ready to continue prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from flashckpt.trainer.config.sample import Choice
from flashckpt.trainer.generate.sampling import Chooser, continuation
from flashckpt.trainer.generate.subject import Subject
from flashckpt.trainer.hub.weights import load
from flashckpt.trainer.model.initial import materialise
from flashckpt.trainer.model.transformer import Transformer


class Speaker:
    """Reads the weights in float32, on a GPU where there is one; its peak is the model and a block of 16 MB.

    Args:
        subject: Whose weights are open; they may be closed afterwards.
        tokens: Most tokens of a prompt and its continuation together.

    Raises:
        DamagedError, ShardGapError: Bytes are missing or damaged.
    """

    def __init__(self, subject: Subject, tokens: int) -> None:
        config, self._ends = subject.weights.model, subject.codec.ends
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        # the turns of "ntk" depend on the length of the table, so that it has to be the one of training
        length = subject.context if config.rope_scaling == "ntk" else tokens
        with torch.device("meta"):
            self._model = Transformer(config, length)
        materialise(self._model, device)
        load([self._model], subject.weights)
        self._model.eval()
        self.device = device.type

    def continuation(self, prompt: Sequence[int], choice: Choice, most: int) -> Iterator[int]:
        """Yield the tokens behind a prompt, at most `most`, without the one that ends the text."""
        return continuation(self._model, prompt, Chooser(choice), most=most, ends=self._ends)
