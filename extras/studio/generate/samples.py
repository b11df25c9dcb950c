"""Samples during training: what the model says to fixed prompts, in any layout.

The forward pass of evaluation, stage after stage, on whole windows and without a cache: so it works wherever the model
trains, and the shapes are those that the layout knows. One rank chooses each token and gives it to all others. Neither
the sampler nor the random state is read: the trace is the same with and without samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.config.sample import Choice
from flashckpt.trainer.generate.codec import TextCodec
from flashckpt.trainer.generate.prompts import read_prompts
from flashckpt.trainer.generate.sampling import Chooser
from flashckpt.trainer.parallel.apply import Parallel


@contextmanager
def quiet(parallel: Parallel) -> Iterator[None]:
    """Run without dropout; leave the random state and the parameters as they are."""
    device = parallel.device
    if device.type in ("cpu", "meta"):
        random_state = torch.random.fork_rng(devices=[])
    else:
        random_state = torch.random.fork_rng(devices=[device], device_type=device.type)
    with random_state:
        for part in parallel.parts:
            part.eval()
        try:
            yield
        finally:
            parallel.reshard()
            for part in parallel.parts:
                part.train()


_ENDED = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A prompt, and the text that the model put behind it."""

    prompt: str
    text: str


class TextWriter:
    """Continues prompts with the model as it is.

    Attributes:
        rows: Prompts that are continued together at no further price.
    """

    def __init__(self, parallel: Parallel, codec: TextCodec, length: int) -> None:
        self._parallel, self._codec, self._length = parallel, codec, length
        self.rows = int(parallel.micro_batch.tokens.shape[0])
        last = parallel.layout.rank_of_stage(parallel.layout.stages - 1)
        self._chooses = int(parallel.mesh.mesh[last, 0, 0, 0])
        """The rank that chooses tokens: the last stage's first."""

    def texts(
        self,
        prompts: Sequence[Sequence[int]],
        choosers: Sequence[Chooser],
        most: int,
        is_over: Callable[[str], bool] = lambda _: False,
    ) -> list[str]:
        """Return what is written behind each prompt, the same on every rank. Collective.

        Args:
            prompts: Tokens of each, fewer than `length`.
            choosers: Of the tokens of each.
            most: Tokens to write.
            is_over: Whether a text needs no more of them.
        """
        whole, found = [list(tokens) for tokens in prompts], [""] * len(prompts)
        is_open = [True] * len(prompts)
        with quiet(self._parallel), torch.no_grad():
            for _ in range(most):
                for number, token in enumerate(self._next(whole, choosers, is_open)):
                    if token == _ENDED:
                        is_open[number] = False
                    else:
                        whole[number].append(token)
                for number in (number for number, one in enumerate(is_open) if one):
                    found[number] = self._text(prompts[number], whole[number][len(prompts[number]) :])
                    is_open[number] = len(whole[number]) < self._length and not is_over(found[number])
                if not any(is_open):
                    break
        return found

    def _next(self, texts: Sequence[Sequence[int]], choosers: Sequence[Chooser], is_open: Sequence[bool]) -> list[int]:
        """Return the next token of each text, _ENDED for one that is finished. Collective over the world."""
        tokens, context = self._windows(texts), self._parallel.context
        tokens = tokens if context is None else context.cut(tokens)
        outputs = self._parallel.forward_only(list(torch.split(tokens, self.rows)))
        whole = [output.full_tensor() if isinstance(output, DTensor) else output for output in outputs]
        chosen = torch.full((len(texts),), _ENDED, dtype=torch.int64)
        rows = torch.cat(whole) if whole else None
        logits = [] if rows is None else [self._last(rows, i, len(text) - 1) for i, text in enumerate(texts)]
        if dist.get_rank() == self._chooses:
            for number in range(len(texts)):
                if is_open[number]:
                    token = choosers[number].next(logits[number])
                    chosen[number] = _ENDED if token in self._codec.ends else token
        chosen = chosen.to(self._parallel.device)
        dist.broadcast(chosen, src=self._chooses)
        return chosen.tolist()

    def _last(self, logits: Tensor, row: int, position: int) -> Tensor:
        context = self._parallel.context
        return logits[row, position] if context is None else context.at(logits, row, position)

    def _windows(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Return whole micro-batches of windows: a text, and zeros behind it, which nothing before them sees."""
        count = -(-len(texts) // self.rows) * self.rows
        windows = torch.zeros(count, self._length, dtype=torch.int64)
        for window, text in zip(windows, texts, strict=False):
            window[: len(text)] = torch.tensor(text)
        return windows.to(self._parallel.device)

    def _text(self, before: Sequence[int], added: Sequence[int]) -> str:
        stream = self._codec.stream(before)
        return "".join([*(stream.push(token) for token in added), stream.finish()])


class SampleMaker:
    """Continues the prompts of `[samples]`.

    Raises:
        ConfigError, DataError: See `read_prompts`.
    """

    def __init__(self, config: RunConfig, parallel: Parallel) -> None:
        codec, self._prompts = read_prompts(config)
        self._settings, self._writer = config.samples, TextWriter(parallel, codec, config.train.seq_len)

    def samples(self) -> list[Sample]:
        """Return one sample per prompt, the same on every rank. Collective."""
        settings = self._settings
        choice = Choice(temperature=settings.temperature, top_p=settings.top_p, seed=settings.seed)
        choosers = [Chooser(replace(choice, seed=choice.seed + number)) for number in range(len(self._prompts))]
        texts = self._writer.texts(self._prompts, choosers, settings.max_tokens)
        return [Sample(prompt=prompt, text=text) for prompt, text in zip(settings.prompts, texts, strict=True)]
