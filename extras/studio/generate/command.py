"""`python -m flashckpt.trainer generate SOURCE "prompt"`. Torch is imported when everything else is in order."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import click

from flashckpt.cli.common import parse_options
from flashckpt.errors import ConfigError
from flashckpt.printable import printable
from flashckpt.trainer.config.command_line import run
from flashckpt.trainer.config.sample import Choice, check_choice
from flashckpt.trainer.generate.codec import TextStream
from flashckpt.trainer.generate.subject import Subject, open_subject
from flashckpt.trainer.hub.source import AVERAGE, MODEL

INTERRUPTED = 130
_ABOUT = """Continue a prompt and print the text as it comes, on the CPU in float32, or on a GPU where there is one.

PROMPT is the text to continue; - reads it from standard input. SOURCE is a checkpoint root (path or URL, of a run in any layout), a Hugging Face folder, or the id of a job on this
machine (flashckpt status): then its newest snapshot is read out of shared memory, while it trains."""


def generate(words: Sequence[str]) -> int:
    """Run `generate WORDS` and return the exit code; errors are raised."""
    try:
        code: int = run(command, words)
    except BrokenPipeError:  # the reader has seen enough; the interpreter flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        return INTERRUPTED
    return code


@click.command(
    "python -m flashckpt.trainer generate",
    help=_ABOUT,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.argument("source")
@click.argument("prompt")
@click.option("--max-tokens", type=int, default=128, metavar="N", help="most tokens to add")
@click.option("--temperature", type=float, default=Choice().temperature, metavar="T", help="0: greedy")
@click.option(
    "--top-p", type=float, default=Choice().top_p, metavar="P",
    help="only the likeliest tokens that together have this probability",
)  # fmt: skip
@click.option("--seed", type=int, default=Choice().seed, metavar="S", help="same seed, same text")
@click.option("--step", metavar="N", help="which checkpoint, as N or N.gM (default: the newest)")
@click.option("--live", is_flag=True, help="SOURCE is a root: ask the job on this machine that writes to it")
@click.option("--ema", is_flag=True, help="the average of the weights, of a run with ema.decay")
@click.option(
    "--tokenizer", default="", show_default=False, metavar="FOLDER_OR_FILE", help='another tokenizer.json, or "bytes"'
)
@click.option("-o", "options", metavar="KEY=VALUE", multiple=True, help="storage option")
@click.option("--json", is_flag=True, help="print one JSON document at the end instead")
def command(**values: Any) -> int:
    """Check what `_ABOUT` explains, and do it."""
    given = SimpleNamespace(**values)
    if given.max_tokens < 1:
        raise ConfigError("--max-tokens is out of range", found=str(given.max_tokens), expected="1 or more")
    check_choice(given.temperature, given.top_p, given.seed, of="--")
    return _generate(given)


def _generate(given: SimpleNamespace) -> int:
    prompt = sys.stdin.read() if given.prompt == "-" else given.prompt
    subject = open_subject(
        given.source,
        live=given.live,
        step=given.step,
        tokenizer=given.tokenizer,
        options=parse_options(given.options),
        label=AVERAGE if given.ema else MODEL,
    )
    try:
        tokens = subject.codec.encode(prompt, subject.weights.model.vocab)
        most = _room(subject, len(tokens), given.max_tokens)
        from flashckpt.trainer.generate.speaker import Speaker  # imports torch

        speaker = Speaker(subject, len(tokens) + most)
    finally:
        subject.weights.close()  # read: nobody's memory is pinned while text is made
    choice = Choice(temperature=given.temperature, top_p=given.top_p, seed=given.seed)
    said = speaker.continuation(tokens, choice, most)
    added = _count(said, tokens, subject, prompt, is_shown=not given.json)
    why = "end" if len(added) < most else "length" if most == given.max_tokens else "context"
    if given.json:
        text = _text(subject, tokens, added)
        document = {
            "source": subject.weights.where, "prompt": prompt, "text": text, "prompt_tokens": tokens, "tokens": added,
            "stopped": why, "device": speaker.device,
        }  # fmt: skip
        _write(json.dumps(document) + "\n")
    elif why == "context":
        sys.stderr.write(f"stopped: the {subject.context} tokens of the model's context are full\n")
    return 0


def _room(subject: Subject, prompt: int, wanted: int) -> int:
    """Return how many tokens fit behind a prompt."""
    if prompt >= subject.context:
        raise ConfigError(
            "the prompt is longer than the model's context",
            found=f"{prompt} tokens",
            expected=f"at most {subject.context - 1}, so that one can be added",
            remedy="shorten the prompt",
        )
    return min(wanted, subject.context - prompt)


def _count(said: Iterator[int], tokens: Sequence[int], subject: Subject, prompt: str, *, is_shown: bool) -> list[int]:
    """Return the tokens that are chosen; show them as they come."""
    stream = subject.codec.stream(tokens)
    added: list[int] = []
    if is_shown:
        _show(prompt)
    for token in said:
        added.append(token)
        if is_shown:
            _show(stream.push(token))
    if is_shown:
        _show(stream.finish() + "\n")
    return added


def _text(subject: Subject, tokens: Sequence[int], added: Sequence[int]) -> str:
    stream: TextStream = subject.codec.stream(tokens)
    return "".join([*(stream.push(token) for token in added), stream.finish()])


def _show(text: str) -> None:
    """Write text; to a terminal without what would move its cursor or change its colours."""
    if text:
        _write(printable(text, keep="\n\t") if sys.stdout.isatty() else text)


def _write(text: str) -> None:
    sys.stdout.write(text.encode(sys.stdout.encoding or "utf-8", "replace").decode(sys.stdout.encoding or "utf-8"))
    sys.stdout.flush()
