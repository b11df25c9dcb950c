"""The key that the ranks of a job share, and what is made of it. Torch-free.

It is derived from the job secret, which the ranks do not have: dlrun keeps that to its agents, and leaves the key in a
file of its folder that this user alone can read. No key is ever sent. Without a secret there is none (b"").
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping

from flashckpt.environment import Environment
from flashckpt.shm import agent_folder


def derived(secret: bytes, purpose: str) -> bytes:
    """Return the key for one purpose, from which neither the secret nor another purpose's key can be found; b"" of none."""
    return hmac.digest(secret, b"flashckpt " + purpose.encode(), "sha256") if secret else b""


def ranks_key(environment: Mapping[str, str] = os.environ) -> bytes:
    """Return the key of this rank's job: of its agent, or of FLASHCKPT_JOB_SECRET under another launcher; b"" if there is none.

    Raises:
        OSError: the agent's file cannot be read.
        ConfigError: the secret is too short.
    """
    if (folder := agent_folder.agent_folder()) is not None:
        return agent_folder.read_key(folder)
    return derived(Environment(environment).FLASHCKPT_JOB_SECRET.encode(), "ranks")


def link_key(ranks: bytes, session: bytes) -> bytes:
    """Return the key by which persisters sign, from the ranks' key and the one that rank 0 has drawn for this session.

    The session's travels between the ranks in clear text: who has seen it there still lacks the ranks'.
    """
    return hmac.digest(ranks, b"replica links " + session, "sha256") if ranks else session
