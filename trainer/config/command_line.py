"""What the commands of the trainer share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from flashckpt.errors import ConfigError


@contextmanager
def parsed(command: click.Command, words: Sequence[str]) -> Iterator[click.Context]:
    """Yield the context of a command line; whatever is wrong with it is an error of flashckpt.

    Raises:
        ConfigError: An option is missing, unknown or wrong.
        SystemExit: With 0, after --help.
    """
    try:
        with command.make_context(command.name, list(words)) as context:
            yield context
    except click.exceptions.Exit as done:
        raise SystemExit(done.exit_code) from None
    except click.UsageError as error:
        usage = (error.ctx.get_usage() if error.ctx else "").removeprefix("Usage: ")
        problem = error.format_message().removesuffix(".")
        raise ConfigError(f"{command.name}: {problem}", expected=usage, remedy="see --help") from None


def run(command: click.Command, words: Sequence[str]) -> Any:
    """Run a command and return what its function returns, 0 after --help; raises ConfigError as `parsed`."""
    try:
        with parsed(command, words) as context:
            return command.invoke(context)
    except SystemExit as done:
        return done.code


def take_flag(words: list[str], name: str) -> bool:
    """Remove a switch from a command line; return whether it was there."""
    if name in words:
        words.remove(name)
        return True
    return False


def take_value(words: list[str], name: str) -> str | None:
    """Remove `name VALUE` or `name=VALUE` from a command line and return the value."""
    for i, word in enumerate(words):
        if word == name and i + 1 < len(words):
            del words[i]
            return words.pop(i)
        if word.startswith(f"{name}="):
            return words.pop(i).partition("=")[2]
    return None
