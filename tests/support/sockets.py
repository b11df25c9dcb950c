"""Pairs of sockets that a test closes at its end."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

Made = contextlib.ExitStack


@pytest.fixture
def made() -> Iterator[Made]:
    with contextlib.ExitStack() as stack:
        yield stack


def pair(made: Made) -> tuple[socket.socket, socket.socket]:
    here, there = socket.socketpair()
    return made.enter_context(here), made.enter_context(there)
