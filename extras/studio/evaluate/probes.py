"""Probes: questions become rows of tokens, and the likelihoods of the rows become results."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flashckpt.environment import env
from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.data.questions import ProbeQuestion, read_questions
from flashckpt.trainer.data.sets import start_token
from flashckpt.trainer.data.vocabulary import Vocabulary
from flashckpt.trainer.evaluate.rows import NO_TARGET, Ints, Rows, RowScores

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
