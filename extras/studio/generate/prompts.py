"""The prompts of `[samples]` as tokens of the run's own tokenizer. Torch-free."""

from __future__ import annotations

from pathlib import Path

from flashckpt.errors import ConfigError
from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.data.prepared import read_prepared
from flashckpt.trainer.generate.codec import TextCodec
from flashckpt.trainer.prepare.vocabulary import read_vocabulary


def read_prompts(config: RunConfig) -> tuple[TextCodec, list[list[int]]]:
    """Return the tokenizer of a run and the tokens of its prompts.

    Raises:
        ConfigError: The run reads tokens and names no tokenizer, or a prompt fills train.seq_len.
        DataError: The data is not prepared.
    """
    codec = run_codec(config)
    found = [codec.encode(prompt, config.model.vocab) for prompt in config.samples.prompts]
    for prompt, tokens in zip(config.samples.prompts, found, strict=True):
        if len(tokens) >= config.train.seq_len:
            raise ConfigError(
                "a prompt of samples.prompts is too long",
                found=f"{len(tokens)} tokens: {prompt[:40]!r}",
                expected=f"at most {config.train.seq_len - 1}, so that one can be added (train.seq_len)",
                state="Nothing was started.",
            )
    return codec, found


def run_codec(config: RunConfig) -> TextCodec:
    """Return the tokenizer that a run's text went through. Raises as `read_prompts`."""
    data = config.data
    if not data.sources:
        return TextCodec(b"")
    if (index := read_prepared(data)) is not None:
        path = Path(data.folder) / index["tokenizer"]
        name = str(path)
        content = path.read_bytes()
    elif data.tokenizer:
        vocabulary = read_vocabulary(data.tokenizer, data.end_token)
        name, content = vocabulary.name, vocabulary.files["tokenizer.json"]
    else:
        raise ConfigError(
            "samples need a tokenizer, and this run reads tokens",
            found="data.tokenizer is empty, and no source is text",
            expected="the tokenizer.json that the tokens were made with",
            state="Nothing was started.",
            remedy="set data.tokenizer, or samples.every = 0",
        )
    codec = TextCodec(content, name=name)
    return TextCodec(content, [codec.number(data.end_token)], name=name) if data.end_token else codec
