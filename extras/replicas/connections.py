"""What all connections between persisters have in common: they are of one session, and no message is longer than it may be."""

from __future__ import annotations

import contextlib
import os
import socket
import threading

from flashckpt.environment import env
from flashckpt.replicate import peer_link
from flashckpt.replicate.peer_link import PeerLink
from flashckpt.replicate.records import ReplicaSession

HANDSHAKE_S = 10.0
"""Seconds within which the other side has proved that it is of this session, however slowly it sends."""
SMALL = 64 << 10
"""Most bytes of a message that carries no manifest."""
LARGE = 256 << 20
"""Most bytes of a message that carries a manifest."""


def give_way() -> None:
    """Let the calling thread take a core only while no rank wants it: what is sent later costs less than a step that is longer.

    FLASHCKPT_REPLICA_NICE is another priority than the lowest, as of `nice`, where replicas that are newer are worth slower steps.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), env.FLASHCKPT_REPLICA_NICE)


def linked(sock: socket.socket, session: ReplicaSession, *, accepts: bool) -> PeerLink:
    """Return the link over a connection; each message on it is signed.

    Args:
        sock: A connection.
        session: Its key and its generation are what both sides must have alike.
        accepts: Whether this side accepted the connection.

    Raises:
        ConfigError: The session has no key.
        StrangerError: The other side is not of this session.
        OSError: The connection is gone, or the other side did not answer in time.
    """
    return peer_link.authenticate(
        sock,
        accepts=accepts,
        secret=session.key,
        purpose="replicas",
        job=f"generation {session.generation}",
        timeout_s=HANDSHAKE_S,
        most=LARGE,
    )
