"""The next token from logits: the likeliest, or drawn with a temperature from the likely ones."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from flashckpt.trainer.config.sample import Choice
from flashckpt.trainer.model.cache import KeyValueCache
from flashckpt.trainer.model.transformer import Transformer


class Chooser:
    """Chooses token after token; has a separate random state."""

    def __init__(self, choice: Choice) -> None:
        self._choice = choice
        self._numbers = torch.Generator().manual_seed(choice.seed)

    def next(self, logits: Tensor) -> int:
        """Return the token behind those whose last logits (vocab,) are given; on the CPU, in float32."""
        logits = logits.detach().float().cpu()
        if self._choice.temperature == 0:
            return int(logits.argmax())
        probability = torch.softmax(logits / self._choice.temperature, -1)
        if self._choice.top_p < 1:
            likely, token = probability.sort(descending=True, stable=True)
            before = likely.cumsum(-1) - likely
            probability[token[before >= self._choice.top_p]] = 0.0  # the first one always stays
        return int(torch.multinomial(probability, 1, generator=self._numbers))


@torch.no_grad()
def continuation(
    model: Transformer, prompt: Sequence[int], chooser: Chooser, *, most: int, ends: Collection[int]
) -> Iterator[int]:
    """Yield the tokens behind a prompt, up to `most`, or to the first of `ends`, which is not yielded.

    Args:
        model: All of it, in evaluation mode, with positions for the prompt and what is added.
        prompt: At least one token.
        chooser: See Chooser.
        most: Tokens to add.
        ends: Tokens that end a text.
    """
    device = next(model.parameters()).device
    cache = KeyValueCache(capacity=len(prompt) + most, window=model.window)
    new = torch.tensor([list(prompt)], device=device)
    for _ in range(most):
        token = chooser.next(model.step(new, cache)[0, -1])
        if token in ends:
            return
        yield token
        new = torch.tensor([[token]], device=device)
