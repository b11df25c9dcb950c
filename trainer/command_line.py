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
