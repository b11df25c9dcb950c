"""What the commands of the trainer share."""

from __future__ import annotations

import argparse
from typing import NoReturn

from flashckpt.errors import ConfigError


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are those of flashckpt: one line, exit code 10."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError."""
        raise ConfigError(f"{self.prog}: {message}", expected=self.format_usage().strip(), remedy="see --help")


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
