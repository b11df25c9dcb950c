"""Evaluates a model: held-out text of each channel, named sets, probes.

Evaluation reads neither the training sampler nor the random state: a run with it has the same trace
as a run without it, bit for bit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flashckpt.environment import env
from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.config.eval import ProbeConfig
from flashckpt.trainer.config.sample import Choice
from flashckpt.trainer.data.mixed import MixedDataset, channels_of, open_data
from flashckpt.trainer.data.windows import Data
from flashckpt.trainer.evaluate.results import Score, Scores
from flashckpt.trainer.evaluate.rows import NO_TARGET, Chunk, Ints, Rows, RowScorer, RowScores, chunks_of
from flashckpt.trainer.generate.codec import TextCodec
from flashckpt.trainer.generate.samples import TextWriter
from flashckpt.trainer.generate.sampling import Chooser
from flashckpt.trainer.parallel.apply import Parallel
from flashckpt.trainer.prepare.vocabulary import Vocabulary
from flashckpt.trainer.scored.answers import AnswerQuestion, is_right, read_answers, stopped
from flashckpt.trainer.scored.questions import ProbeQuestion, read_questions
from flashckpt.trainer.scored.sets import run_vocabulary, sets_of, start_token

logger = logging.getLogger(__name__)

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Continued:
    """Tokens of which the last `targets` are asked for: each is predicted from those before it."""

    tokens: Ints
    targets: int


def continued(vocabulary: Vocabulary, pairs: Sequence[tuple[str, str]], start: int | None) -> list[Continued]:
    """Return the tokens of (prompt, continuation) pairs, cut where lm-eval cuts them.

    Both are tokenised together, and what the prompt alone takes is cut off: a tokenizer may join the end of one with
    the beginning of the other. White space at the end of a prompt counts to the continuation.

    Args:
        vocabulary: Of the model.
        pairs: Texts; the second is not empty.
        start: The token before every prompt; None: the end token, where a prompt is empty.
    """
    moved = [(prompt.rstrip(), prompt[len(prompt.rstrip()) :] + rest) for prompt, rest in pairs]
    whole = [one[:-1] for one in vocabulary.encode([prompt + rest for prompt, rest in moved])]  # without the end token
    alone = [one[:-1] for one in vocabulary.encode([prompt for prompt, _ in moved])]
    found = []
    for both, prompt in zip(whole, alone, strict=True):
        first = [start] if start is not None else [] if len(prompt) else [vocabulary.end]
        # at least one token is asked for, even if all of the continuation was joined with the prompt
        targets = max(len(both) - len(prompt), min(1, len(both)))
        found.append(Continued(tokens=np.array([*first, *both], np.int64), targets=targets))
    return found


class Probe:
    """The questions of one probe as rows of tokens.

    Args:
        kind: One of `PROBES`.
        questions: In the order of the file.
        texts: The tokens of all their continuations, one after the other.
        seq_len: Tokens that the model takes; longer texts are cut from the left, which is logged.
    """

    def __init__(
        self, name: str, kind: str, questions: Sequence[ProbeQuestion], texts: Sequence[Continued], seq_len: int
    ) -> None:
        self.name = name
        self._kind, self._questions = kind, questions
        self._texts = [_cut(one, seq_len) for one in texts]
        self.cut = sum(len(one.tokens) > seq_len + 1 for one in texts)
        self.lengths = np.array([max(1, len(one.tokens) - 1) for one in self._texts], np.int64)
        if self.cut and env.RANK == 0:
            logger.warning(
                "%d of %d texts of the probe %s are longer than train.seq_len = %d and were cut from the left",
                self.cut, len(texts), name, seq_len,
            )  # fmt: skip

    def rows(self, numbers: Ints, length: int) -> Rows:
        """Return the texts with these numbers, filled up to `length`."""
        tokens = np.zeros((len(numbers), length), np.int64)
        targets = np.full((len(numbers), length), NO_TARGET, np.int64)
        for row, number in enumerate(numbers):
            one = self._texts[int(number)]
            last = len(one.tokens) - 1
            tokens[row, :last] = one.tokens[:-1]
            targets[row, last - one.targets : last] = one.tokens[1:][last - one.targets :]
        return Rows(tokens=tokens, targets=targets)

    def results(self, scores: RowScores) -> dict[str, float]:
        """Return the figures of the probe: shares and means over its questions, their number, and texts that were cut."""
        found = _RESULTS[self._kind](self._questions, -scores.nats, scores.greedy == scores.targets)
        return {**found, "questions": len(self._questions), "cut": self.cut}


def open_probes(config: RunConfig, vocabulary: Vocabulary) -> list[Probe]:
    """Return the probes of a run that are answered by likelihoods.

    Raises:
        DataError: a file cannot be read, or a line is no question.
        ConfigError: the tokenizer has no eval.start_token.
    """
    start = start_token(config, vocabulary)
    found = []
    for one in (one for one in config.eval.probes if one.kind != "generate"):
        questions = read_questions(one)
        pairs = [(question.prompt, text) for question in questions for text in question.continuations]
        texts = continued(vocabulary, pairs, start)
        found.append(Probe(one.name, one.kind, questions, texts, config.train.seq_len))
    return found


def _cut(one: Continued, seq_len: int) -> Continued:
    return Continued(tokens=one.tokens[-(seq_len + 1) :], targets=min(one.targets, seq_len, len(one.tokens) - 1))


def _probability(_: Sequence[ProbeQuestion], likelihoods: Floats, greedy: npt.NDArray[np.bool_]) -> dict[str, float]:
    return {
        "probability": float(np.exp(likelihoods).mean()),
        "log_probability": float(likelihoods.mean()),
        "rank_1": float(greedy.mean()),
    }


def _pairs(_: Sequence[ProbeQuestion], likelihoods: Floats, __: npt.NDArray[np.bool_]) -> dict[str, float]:
    better, worse = likelihoods[0::2], likelihoods[1::2]
    return {"accuracy": float((better > worse).mean())}


def _choice(questions: Sequence[ProbeQuestion], likelihoods: Floats, _: npt.NDArray[np.bool_]) -> dict[str, float]:
    sizes: Mapping[str, Callable[[str], int]] = {
        "acc": lambda _: 1,
        "acc_norm": len,
        "acc_bytes": lambda ending: len(ending.encode("utf-8", "replace")),
    }
    right = dict.fromkeys(sizes, 0)
    first = 0
    for question in questions:
        mine = likelihoods[first : first + len(question.endings)]
        first += len(question.endings)
        for name, size in sizes.items():
            right[name] += int(np.argmax(mine / [size(ending) for ending in question.endings])) == question.right
    return {name: count / len(questions) for name, count in right.items()}


_RESULTS: Mapping[str, Callable[[Sequence[ProbeQuestion], Floats, npt.NDArray[np.bool_]], dict[str, float]]] = {
    "probability": _probability, "pairs": _pairs, "choice": _choice,
}  # fmt: skip


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
