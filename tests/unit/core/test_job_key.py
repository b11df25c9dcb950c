"""The key of the ranks and of the persisters' links: made of the job secret, which neither of them has."""

from __future__ import annotations

import os
import socket
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.agents import pretend_agent

from flashckpt.errors import ConfigError
from flashckpt.replicate.connections import linked
from flashckpt.replicate.peer_link import PeerLink, StrangerError
from flashckpt.replicate.records import ReplicaSession
from flashckpt.shm import agent_folder

SECRET = b"correct-horse-battery-staple"
DRAWN = b"s" * 32
"""What rank 0 draws for a session, and gives to the others in clear text."""


def test_keys_of_other_purposes_secrets_and_sessions_differ_and_none_is_the_secret() -> None:
    keys = {
        agent_folder.derived(SECRET, "ranks"),
        agent_folder.derived(SECRET, "another"),
        agent_folder.derived(b"another secret of a job", "ranks"),
        agent_folder.link_key(agent_folder.derived(SECRET, "ranks"), DRAWN),
        agent_folder.link_key(agent_folder.derived(SECRET, "ranks"), b"t" * 32),
        SECRET,
        DRAWN,
    }
    assert len(keys) == 7
    assert agent_folder.derived(b"", "ranks") == b""
    assert agent_folder.link_key(b"", DRAWN) == DRAWN


def test_key_of_an_agent_is_for_this_user_alone_and_goes_before_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = {"FLASHCKPT_JOB_SECRET": SECRET.decode()}
    monkeypatch.setenv("FLASHCKPT_AGENT_DIR", "")
    assert agent_folder.ranks_key({}) == b""
    with pytest.raises(ConfigError, match="FLASHCKPT_JOB_SECRET") as caught:
        agent_folder.ranks_key({"FLASHCKPT_JOB_SECRET": "short"})
    assert "short" not in str(caught.value)
    assert agent_folder.ranks_key(secret) == agent_folder.derived(SECRET, "ranks")
    monkeypatch.setenv("FLASHCKPT_AGENT_DIR", pretend_agent(tmp_path))
    assert agent_folder.ranks_key(secret) == b"", "dlrun has left none"
    before = os.umask(0)
    try:
        agent_folder.write_key(tmp_path, DRAWN)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert agent_folder.ranks_key({}) == DRAWN


def session(key: bytes) -> ReplicaSession:
    return ReplicaSession(generation=1, node=0, addresses=(), domains=(), ranks=(), replicas=1, secret={"key": key})


def join(one: ReplicaSession, other: ReplicaSession) -> list[PeerLink | BaseException]:
    left, right = socket.socketpair()
    with left, right, ThreadPoolExecutor(2) as pool:

        def enter(sock: socket.socket, of: ReplicaSession, *, accepts: bool) -> PeerLink:
            try:
                return linked(sock, of, accepts=accepts)
            except BaseException:
                sock.close()
                raise

        both = [pool.submit(enter, left, one, accepts=False), pool.submit(enter, right, other, accepts=True)]
        return [each.exception() or each.result() for each in both]


def test_persisters_of_the_job_join_and_who_has_only_seen_the_sessions_number_does_not() -> None:
    of_job = session(agent_folder.link_key(agent_folder.derived(SECRET, "ranks"), DRAWN))
    assert [type(each) for each in join(of_job, of_job)] == [PeerLink, PeerLink]
    for others in ((session(DRAWN), of_job), (of_job, session(DRAWN))):
        found = join(*others)
        assert all(isinstance(each, OSError) for each in found), found
        assert any(
            isinstance(each, StrangerError) and "does not know the key (replicas)" in str(each) for each in found
        )
