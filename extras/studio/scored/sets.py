"""`[[eval.sets]]` as sources of data that are held out whole, and the tokenizer of a run. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashckpt.errors import ConfigError
from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.config.data import DataConfig
from flashckpt.trainer.data.prepared import digest_of, read_prepared
from flashckpt.trainer.data.token_windows import check_token_files
from flashckpt.trainer.prepare.shards import PrepareProgress, prepare
from flashckpt.trainer.prepare.vocabulary import Vocabulary, read_vocabulary, tokenizer_file
from flashckpt.trainer.scored.answers import read_answers
from flashckpt.trainer.scored.questions import read_questions

NAME = "eval.sets"
FOLDER = "eval"
"""The part of `data.folder` in which prepared sets are."""


def tokenizer_place(config: RunConfig) -> str:
    """Return where the tokenizer of a run is, as `read_vocabulary` takes it: data.tokenizer, or that of the first text.

    Raises:
        DataError: it is made by `data prepare`, and nothing is prepared.
        ConfigError: the run knows tokens alone.
    """
    data = config.data
    if data.tokenizer or not data.sources:
        return data.tokenizer
    index = read_prepared(data)
    if index is None:
        raise ConfigError(
            "text cannot be evaluated: the tokenizer of this run is not known",
            found="[[data.sources]] of tokens alone, and no data.tokenizer",
            expected="data.tokenizer = a tokenizer.json, or the folder of one",
            state="Nothing was started.",
        )
    digest = next(one for one in index["digests"] if one)
    return "" if digest == digest_of("", data.end_token) else str(Path(data.folder) / tokenizer_file(digest))


def run_vocabulary(config: RunConfig) -> Vocabulary:
    """Return the vocabulary of a run's text.

    Raises:
        ConfigError, DataError: see `tokenizer_place` and `read_vocabulary`; or it has more tokens than the model.
    """
    vocabulary = read_vocabulary(tokenizer_place(config), config.data.end_token)
    if vocabulary.size > config.model.vocab:
        raise _too_large(vocabulary.size, config)
    return vocabulary


def sets_of(config: RunConfig) -> RunConfig:
    """Return the run with its evaluation sets in place of its data: a channel each, all of it held out."""
    sources = tuple(one.source() for one in config.eval.sets)
    tokenizer = tokenizer_place(config) if any(one.has_text for one in sources) else ""
    data = DataConfig(
        folder=str(Path(config.data.folder) / FOLDER),
        holdout_every=1,
        sources=sources,
        tokenizer=tokenizer,
        end_token=config.data.end_token if tokenizer else "",
        document_mask=config.data.document_mask and bool(config.data.sources),  # as the run trains
    )
    return replace(config, data=data)


def prepare_sets(
    config: RunConfig, report: Callable[[PrepareProgress], None] = lambda _: None
) -> dict[str, Any] | None:
    """Tokenise the evaluation sets of a run, after its data, and return their index; None if none of them is text.

    Raises:
        ConfigError, DataError: see `prepare` and `tokenizer_place`.
    """
    if not any(one.source().has_text for one in config.eval.sets):
        return None
    return prepare(sets_of(config).data, report, name=NAME)


def check_sets(config: RunConfig) -> None:
    """Refuse evaluation sets that are not prepared, cannot be read, or have more tokens than the model.

    Raises:
        ConfigError, DataError: see above.
    """
    if not config.eval.sets:
        return
    found = sets_of(config)
    index = read_prepared(found.data, name=NAME)
    if index is not None and index["vocab"] > config.model.vocab:
        raise _too_large(index["vocab"], config)
    for source in found.data.sources:
        if not source.has_text:
            check_token_files(source, config.train.seq_len, config.model.vocab)


def check_evaluation(config: RunConfig) -> None:
    """Refuse sets and probes that cannot be evaluated, before torch is imported.

    Raises:
        ConfigError, DataError: see `check_sets`, `run_vocabulary` and `read_questions`; or there is no eval.start_token.
    """
    check_sets(config)
    for probe in config.eval.probes:
        (read_answers if probe.kind == "generate" else read_questions)(probe)
    if config.eval.probes:
        start_token(config, run_vocabulary(config))


def start_token(config: RunConfig, vocabulary: Vocabulary) -> int | None:
    """Return the number of eval.start_token; None if none is set.

    Raises:
        ConfigError: the tokenizer has no such token.
    """
    name = config.eval.start_token
    number = vocabulary.number_of(name) if name else None
    if name and number is None:
        raise ConfigError(
            f"the tokenizer {vocabulary.name} has no token {name!r}",
            found=f"eval.start_token = {name!r}",
            expected="the name of one of its tokens, such as <s> or <|begin_of_text|>",
            state="Nothing was started.",
        )
    return number


def _too_large(size: int, config: RunConfig) -> ConfigError:
    return ConfigError(
        "the tokenizer has more tokens than the model",
        found=f"model.vocab = {config.model.vocab}",
        expected=f"{size} or more",
        state="Nothing was started.",
        remedy="raise model.vocab, or use the tokenizer of the model",
    )
