"""Evaluates a model: held-out text of each channel, named sets, probes.

Evaluation reads neither the training sampler nor the random state: a run with it has the same trace
as a run without it, bit for bit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from flashckpt.environment import env
from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.config.eval import ProbeConfig
from flashckpt.trainer.config.sample import Choice
from flashckpt.trainer.data.answers import AnswerQuestion, is_right, read_answers, stopped
from flashckpt.trainer.data.mixed import MixedDataset, channels_of, open_data
from flashckpt.trainer.data.sets import run_vocabulary, sets_of, start_token
from flashckpt.trainer.data.vocabulary import Vocabulary
from flashckpt.trainer.data.windows import Data
from flashckpt.trainer.evaluate.probes import Probe, open_probes
from flashckpt.trainer.evaluate.results import Score, Scores
from flashckpt.trainer.evaluate.rows import NO_TARGET, Chunk, Ints, Rows, RowScorer, RowScores, chunks_of
from flashckpt.trainer.generate.codec import TextCodec
from flashckpt.trainer.generate.samples import TextWriter
from flashckpt.trainer.generate.sampling import Chooser
from flashckpt.trainer.parallel.apply import Parallel

logger = logging.getLogger(__name__)
_BATCHES = 8
"""Micro-batches of prompts that are continued together."""


def score_of(rows: RowScores) -> Score:
    """Return the score of a text whose windows are these rows: each token weighs the same."""
    tokens, nbytes = int(rows.targets.sum()), float(rows.nbytes.sum())
    return Score(
        loss=float(rows.nats.sum()) / tokens if tokens else math.nan,
        tokens=tokens,
        bits_per_byte=float(rows.text_nats.sum()) / math.log(2) / nbytes if nbytes else math.nan,
    )


class Evaluator:
    """Scores the texts and probes of a run with the model as it is.

    Raises:
        DataError: there is no held-out sample, a set is not prepared, or a probe cannot be read.
        ConfigError: the tokenizer that sets or probes need is not known, or does not fit the model.
    """

    def __init__(self, config: RunConfig, parallel: Parallel) -> None:
        self._batch, self._seq_len = config.train.global_batch, config.train.seq_len
        cp, tp = parallel.layout.cp, parallel.layout.tp if config.parallel.sequence_parallel else 1
        self._multiple = cp * (tp if cp == 1 else math.lcm(2, tp))
        self._scorer = RowScorer(parallel, loss_parallel_on=config.parallel.loss_parallel)
        self._held = _held_out(config) if config.eval.held_out else {}
        self._sets = _sets(config)
        self._probes = _probes(config, parallel)

    def scores(self) -> Scores:
        """Return all results, the same on every rank. Collective."""
        return Scores(
            held_out={name: self._text(text) for name, text in self._held.items()},
            sets={name: self._text(text) for name, text in self._sets.items()},
            probes={
                name: probe.results() if isinstance(probe, AnswerProbe) else self._probe(probe)
                for name, probe in self._probes.items()
            },
        )

    def _text(self, text: _Text) -> Score:
        count = len(text.ids)
        chunks = [Chunk(ids=np.arange(i, min(i + self._batch, count)), length=0) for i in range(0, count, self._batch)]
        return score_of(self._scorer.score(chunks, text.rows))

    def _probe(self, probe: Probe) -> Mapping[str, float]:
        chunks = chunks_of(probe.lengths, self._batch, most=self._seq_len, multiple=self._multiple)
        return probe.results(self._scorer.score(chunks, probe.rows))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Text:
    """Windows `ids` of some data."""

    data: Data
    ids: Ints

    def rows(self, numbers: Ints, _: int) -> Rows:
        ids = self.ids[numbers]
        batch, sizes = self.data.batch(ids), self.data.text_bytes(ids)
        targets = batch.targets[:, :-1].numpy()
        predicted = targets != NO_TARGET
        return Rows(
            tokens=batch.tokens.numpy(),
            targets=targets,
            documents=None if batch.documents is None else batch.documents.numpy(),
            text=None if sizes is None else sizes >= 0,
            nbytes=np.full(len(ids), np.nan)
            if sizes is None
            else np.where(predicted & (sizes >= 0), sizes, 0).sum(1).astype(np.float64),
        )


def _held_out(config: RunConfig) -> dict[str, _Text]:
    data = open_data(config, "held")
    if missing := [name for name in channels_of(config) if name not in data.channels]:
        text = "nothing is held out of %s: not evaluated; lower data.holdout_every (%d), or add documents"
        logger.log(
            logging.WARNING if env.RANK == 0 else logging.DEBUG,
            text,
            ", ".join(f"channel {name}" for name in missing),
            config.data.holdout_every,
        )
    return _channels(data, config.train.global_batch * config.eval.batches)


def _channels(data: Data, most: int) -> dict[str, _Text]:
    return {name: _Text(data=data, ids=data.channel_ids(number, most)) for number, name in enumerate(data.channels)}


def _sets(config: RunConfig) -> dict[str, _Text]:
    if not config.eval.sets:
        return {}
    data = MixedDataset(sets_of(config), "held", is_sets=True)
    found = {}
    for number, one in enumerate(config.eval.sets):
        most = one.batches * config.train.global_batch or len(data.samples)
        found[one.name] = _Text(data=data, ids=data.channel_ids(number, most))
    return found


def _probes(config: RunConfig, parallel: Parallel) -> dict[str, Probe | AnswerProbe]:
    """Return the probes of a run by name, in the order of the configuration."""
    if not config.eval.probes:
        return {}
    vocabulary = run_vocabulary(config)
    found: dict[str, Probe | AnswerProbe] = {probe.name: probe for probe in open_probes(config, vocabulary)}
    found |= open_answers(config, vocabulary, parallel)
    return {one.name: found[one.name] for one in config.eval.probes}


class AnswerProbe:
    """The questions of one probe as prompts of tokens.

    Args:
        probe: Of kind "generate".
        questions: In the order of the file.
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
