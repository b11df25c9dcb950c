"""The secret that the nodes of one job share, and what they sign with it (torch-free).

It comes from the environment or a file, never from the command line, which every user of the machine can read. It
is not passed on to the workers: they get a key that is derived from it (agent_folder).
"""

from __future__ import annotations

import hmac
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from flashckpt.environment import LEAST_SECRET, Environment
from flashckpt.errors import ConfigError

VARIABLE, FILE_VARIABLE = "FLASHCKPT_JOB_SECRET", "FLASHCKPT_JOB_SECRET_FILE"
MOST_BYTES = 8 << 20
"""Longest message that is looked at; torch's stores take no longer values."""


class UnsealedError(Exception):
    """A message that was not sealed with this job's secret; the text says what is wrong with it."""


class Seal:
    """Signs and verifies data that others could overwrite, for one purpose of one job.

    Args:
        secret: The job's secret; b"" signs nothing and rejects signed data.
        purpose: The kind of data, and the run: data of another purpose or run does not verify.
    """

    def __init__(self, secret: bytes, purpose: str) -> None:
        self._secret, self._purpose = secret, purpose.encode()

    def close(self, text: str) -> bytes:
        """Return `text` with its signature before it, or with "-" where there is no secret."""
        return f"{self._mark(text)} {text}".encode()

    def open(self, data: bytes, most: int = MOST_BYTES) -> str:
        """Return the text of a sealed message of at most `most` bytes.

        Raises:
            UnsealedError: it is not signed with this secret for this purpose.
        """
        if len(data) > most:
            raise UnsealedError(f"it is longer than {most} bytes")
        try:
            mark, space, text = data.decode().partition(" ")
        except UnicodeDecodeError:
            mark, space, text = "", "", ""
        if not space:
            raise UnsealedError("it was not written by dlrun")
        if not self._secret and mark != "-":
            raise UnsealedError(f"it is signed, and this node has no job secret ({VARIABLE})")
        if not hmac.compare_digest(mark.encode(), self._mark(text).encode()):
            raise UnsealedError("it is not signed with the job secret of this node")
        return text

    def _mark(self, text: str) -> str:
        if not self._secret:
            return "-"
        return hmac.new(self._secret, self._purpose + b"\0" + text.encode(), "sha256").hexdigest()


def read_secret(environment: Mapping[str, str] = os.environ) -> bytes:
    """Return the job's secret, b"" if there is none.

    Raises:
        ConfigError: it is too short, or its file cannot be read, or others can read it.
    """
    values = Environment(environment)
    if values.FLASHCKPT_JOB_SECRET or not values.FLASHCKPT_JOB_SECRET_FILE:
        return values.FLASHCKPT_JOB_SECRET.encode()
    secret = _read(Path(values.FLASHCKPT_JOB_SECRET_FILE))
    if len(secret) < LEAST_SECRET:
        raise ConfigError(
            f"the job secret is too short ({FILE_VARIABLE})",
            found=f"{len(secret)} characters",
            expected=f"at least {LEAST_SECRET}",
            remedy="make one with: openssl rand -hex 32",
        )
    return secret.encode()


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            data = file.read(4096)
    except OSError as error:
        raise ConfigError(f"the file of the job secret cannot be read ({FILE_VARIABLE})", found=str(error)) from error
    shared = stat.S_IRWXO if status.st_uid == 0 else stat.S_IRWXO | stat.S_IRWXG
    if status.st_mode & shared or status.st_uid not in {0, os.getuid()}:
        raise ConfigError(
            f"others can read the file of the job secret ({FILE_VARIABLE})",
            found=f"{path} with mode {stat.S_IMODE(status.st_mode):04o}, owner {status.st_uid}",
            expected="a file of this user with mode 0600",
            remedy=f"chmod 600 {path}, and choose another secret",
        )
    return data.decode(errors="replace").strip()


def without(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the secret."""
    return {name: value for name, value in environment.items() if name not in {VARIABLE, FILE_VARIABLE}}
