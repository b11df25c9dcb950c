"""Probes of kind "generate": what the model writes behind each question, judged by the answer."""

from __future__ import annotations

from collections.abc import Sequence

from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.config.eval import ProbeConfig
from flashckpt.trainer.config.sample import Choice
from flashckpt.trainer.data.answers import AnswerQuestion, is_right, read_answers, stopped
from flashckpt.trainer.data.sets import start_token
from flashckpt.trainer.data.vocabulary import Vocabulary
from flashckpt.trainer.generate.codec import TextCodec
from flashckpt.trainer.generate.samples import TextWriter
from flashckpt.trainer.generate.sampling import Chooser
from flashckpt.trainer.parallel.apply import Parallel

_BATCHES = 8
"""Micro-batches of prompts that are continued together."""


class AnswerProbe:
    """The questions of one probe as prompts of tokens.

    Args:
        probe: Of kind "generate".
        questions: In the order of the file.
        prompts: Their tokens.
        writer: Continues them.
        length: Tokens that prompt and answer may have together; a longer prompt is cut from the left.
    """

    def __init__(
        self,
        probe: ProbeConfig,
        questions: Sequence[AnswerQuestion],
        prompts: Sequence[Sequence[int]],
        writer: TextWriter,
        length: int,
    ) -> None:
        self._probe, self._questions, self._writer = probe, questions, writer
        room = max(1, length - probe.max_tokens)
        self._prompts = [one[-room:] for one in prompts]
        self.cut = sum(len(one) > room for one in prompts)

    def results(self) -> dict[str, float]:
        """Return the share of right answers, the number of questions, and of prompts that were cut. Collective."""
        right, size = 0, self._writer.rows * _BATCHES
        for first in range(0, len(self._prompts), size):
            prompts = self._prompts[first : first + size]
            choosers = [Chooser(Choice(temperature=0.0)) for _ in prompts]
            texts = self._writer.texts(prompts, choosers, self._probe.max_tokens, self._is_over)
            for question, text in zip(self._questions[first : first + size], texts, strict=True):
                end = stopped(text, self._probe.stop)
                right += is_right(text if end is None else end, question, self._probe.match)
        return {"acc": right / len(self._questions), "questions": len(self._questions), "cut": self.cut}

    def _is_over(self, text: str) -> bool:
        return stopped(text, self._probe.stop) is not None


def open_answers(config: RunConfig, vocabulary: Vocabulary, parallel: Parallel) -> dict[str, AnswerProbe]:
    """Return the probes of kind "generate" of a run by name; raises as `open_probes`."""
    probes = [one for one in config.eval.probes if one.kind == "generate"]
    if not probes:
        return {}
    start = start_token(config, vocabulary)
    content = b"" if vocabulary.is_bytes else vocabulary.files["tokenizer.json"]
    writer = TextWriter(parallel, TextCodec(content, [vocabulary.end], name=vocabulary.name), config.train.seq_len)
    found = {}
    for probe in probes:
        questions = read_answers(probe)
        encoded = vocabulary.encode([one.prompt for one in questions])
        prompts = [[*([] if start is None else [start]), *map(int, one[:-1])] or [vocabulary.end] for one in encoded]
        found[probe.name] = AnswerProbe(probe, questions, prompts, writer, config.train.seq_len)
    return found
