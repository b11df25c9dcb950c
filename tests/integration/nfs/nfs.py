"""Checkpoints on NFS: a kernel's client and a kernel's server, which is killed and started again (make test-nfs; root).

Server and clients are machines of User Mode Linux (tests/support/machines.py). What a call of `client` does stands in
client.py; the tests here say when, and when the server's power is cut.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest
from support.machines import Machine, Network, missing, network, refusal
from support.ranks import wait_for

pytestmark = [pytest.mark.timeout(300), pytest.mark.skipif(os.geteuid() != 0, reason="the machines need root")]

VERSIONS = ("4.2", "4.1", "3")
MIB = 1 << 20
EXPORT = "/run/disk/export"
_folders = (f"folder{number}" for number in itertools.count())
versions = pytest.mark.parametrize("version", VERSIONS)


class Machines:
    """The machines that the tests share; after a test that left one of them in the middle of a call, others."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._network: Network | None = None

    def idle(self) -> Network:
        if self._network is None or not self._network.is_idle:
            self.close()
            self._network = self._stack.enter_context(network(2))
        return self._network

    def close(self) -> None:
        self._stack.close()


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    if program := missing():
        pytest.skip(f"{program} is not installed: tests/integration/nfs/machines.sh install")
    if reason := refusal():
        pytest.skip(f"User Mode Linux does not run here: {reason}")
    shared = Machines()
    yield shared
    shared.close()


class Nfs:
    """A folder of the export, mounted by two machines."""

    def __init__(self, joined: Network, version: str, options: str) -> None:
        self.network, self.folder = joined, next(_folders)
        self.one, self.other = joined.clients
        for number, client in enumerate(joined.clients):
            self.call("mount", version, number, options, client=client)

    def call(self, name: str, *arguments: object, client: Machine | None = None, deadline_s: float = 100) -> Any:
        return (client or self.one).call(f"integration.nfs.client:{name}", *arguments, deadline_s=deadline_s)

    def begin(self, name: str, *arguments: object, client: Machine | None = None) -> None:
        (client or self.one).begin(f"integration.nfs.client:{name}", *arguments)

    def on_server(self, find: str) -> list[str]:
        """Return what `find` finds in this test's folder on the server's own disk."""
        found = self.call("shell", f"cd {EXPORT}/{self.folder} && find . {find}", client=self.network.server)[1]
        return sorted(str(found).split())

    def restart(self) -> None:
        self.network.server.kill()
        self.start()

    def start(self) -> None:
        self.network.start_server()
        self.network.server.ready()

    def left_behind(self) -> list[str]:
        return self.on_server(r"-name '*.tmp' -o -name '.nfs*' -o -name '*.old'")


@pytest.fixture
def nfs(machines: Machines, request: pytest.FixtureRequest) -> Nfs:
    named = getattr(request.node, "callspec", None)
    version = named.params.get("version", "4.2") if named else "4.2"
    return Nfs(machines.idle(), version, named.params.get("options", "") if named else "")


@versions
def test_store_keeps_all_its_promises(nfs: Nfs, version: str) -> None:
    code, said = nfs.call("conformance", nfs.folder, deadline_s=120)
    assert code == 0, said
    assert "passed" in said
    assert version in VERSIONS
    assert not nfs.left_behind()


@versions
def test_large_object_is_written_by_large_requests_alone(nfs: Nfs, version: str) -> None:
    """The C library reserves room by a byte per page where the server cannot: 4.2 alone can."""
    asked = nfs.call("written", nfs.folder, 24 * MIB)
    assert 0 < asked["WRITE"] <= 24 * MIB // 32768, asked
    assert asked.get("ALLOCATE", 0) == (version == "4.2")


@pytest.mark.parametrize("options", [",actimeo=600"])
@pytest.mark.parametrize(
    ("version", "what", "published", "calls"),
    [
        ("4.2", "claim", "-name claim", 1),
        ("4.1", "claim", "-name claim", 1),
        ("4.2", "object", "-name object", 1),
        ("3", "object", "-name object", 1),
        ("4.2", "export", "-path '*/exported/file'", 1),
        ("4.2", "export over a folder", "-path '*/exported/file'", 2),
        ("3", "export over a folder", "-path '*/exported/file'", 2),
    ],
)
def test_answer_that_is_lost_with_the_server_is_no_failure(
    nfs: Nfs, version: str, options: str, what: str, published: str, calls: int
) -> None:
    """The server has done it and dies before its answer arrives; the client's kernel asks the next one for it again.

    What the client knows of a file it believes for long: the server may be back before that is asked again.
    """
    assert version in VERSIONS
    assert options
    nfs.call("shell", f"mkdir {EXPORT}/{nfs.folder}", client=nfs.network.server)
    if what == "export over a folder":
        assert nfs.call("export", nfs.folder, "old")
        assert not nfs.call("exchanges", f"{nfs.folder}/names"), "no file system that this is written for"
    nfs.call("publish_unanswered", nfs.folder, what)
    aside = "-name '*.old'" if what == "export over a folder" else published  # the first rename of two has put it there
    # in this order: the old folder is published, too, until it is put aside
    wait_for(lambda: nfs.on_server(aside) and nfs.on_server(published), what="the server to publish it")
    nfs.restart()
    assert nfs.call("answered", deadline_s=120) == [True, "new" if "export" in what else "mine", calls]
    assert not nfs.left_behind()


@versions
def test_what_another_machine_writes_is_seen_at_once(nfs: Nfs, version: str) -> None:
    """NFS remembers for 30 s what was not there: the nodes of a job wait for the MANIFEST that one of them creates."""
    assert version in VERSIONS
    nfs.call("put", nfs.folder, "root")
    for key in ("new/MANIFEST", "new/deep/index"):
        assert nfs.call("there", nfs.folder, key, client=nfs.other) == [False] * 3
        nfs.on_server("")  # version 3 tells changes of a folder by their time: they must lie a tick of the clock apart
        nfs.call("put", nfs.folder, key)
        assert nfs.call("there", nfs.folder, key, client=nfs.other) == [True] * 3


@versions
def test_folder_that_another_machine_removes_meanwhile_is_empty(nfs: Nfs, version: str) -> None:
    assert version in VERSIONS
    nfs.call("put", nfs.folder, "going/file")
    nfs.call("list_slowly", nfs.folder, "going")
    nfs.call("delete", nfs.folder, "going/file", client=nfs.other)
    assert nfs.call("finished") == [[], []]


@versions
def test_object_that_another_machine_deletes_while_it_is_read_is_missing(nfs: Nfs, version: str) -> None:
    """Where the server that knew of the open file has ended, the client's handle of it is stale."""
    assert version in VERSIONS
    nfs.call("written", nfs.folder, 2 * MIB, client=nfs.other)
    nfs.call("read_slowly", nfs.folder, "pack", 2 * MIB)
    nfs.call("delete", nfs.folder, "pack", client=nfs.other)
    nfs.restart()
    found = nfs.call("finished")
    assert found.startswith("ObjectMissingError: the object pack of"), found


@versions
def test_file_that_is_deleted_while_it_is_open_is_no_object(nfs: Nfs, version: str) -> None:
    assert version in VERSIONS
    nfs.call("put", nfs.folder, "old/file")
    assert nfs.call("delete_while_open", nfs.folder, "old/file") == []
    wait_for(lambda: not nfs.on_server("-type f"), what="the client to remove what was open")


@versions
def test_of_two_machines_exactly_one_creates_each_object(nfs: Nfs, version: str) -> None:
    assert version in VERSIONS
    nfs.call("put", nfs.folder, "ready")
    nfs.begin("claims", nfs.folder, "one", 40)
    theirs = nfs.call("claims", nfs.folder, "other", 40, client=nfs.other)
    mine = nfs.one.answer()
    assert sorted([*mine, *theirs]) == sorted(f"claim-{number}" for number in range(40))
    expected = {**dict.fromkeys(mine, "one"), **dict.fromkeys(theirs, "other")}
    for client in (nfs.one, nfs.other):
        assert nfs.call("claimants", nfs.folder, client=client) == expected
    assert not nfs.left_behind()


@versions
def test_two_machines_commit_one_checkpoint_once(nfs: Nfs, version: str) -> None:
    """Each has persisted its half and believes that it is its turn to commit."""
    assert version in VERSIONS
    steps = list(range(10, 20))
    nfs.begin("part", nfs.folder, 0, steps)
    nfs.call("part", nfs.folder, 1, steps, client=nfs.other)
    nfs.one.answer()
    nfs.begin("commits", nfs.folder, steps)
    theirs = nfs.call("commits", nfs.folder, steps, client=nfs.other)
    assert sorted([*nfs.one.answer(), *theirs]) == steps
    for client in (nfs.one, nfs.other):
        assert nfs.call("checkpoints", nfs.folder, client=client) == steps
    assert len(nfs.on_server("-name 'MANIFEST*'")) == len(steps)
    assert not nfs.left_behind()


def trained_until_a_pack_is_written(nfs: Nfs, committed: int) -> int:
    """Train two steps at a time until a persist is seen at work; return the step that is committed before it.

    One may be over before anybody has looked: then the next one is waited for.
    """

    def seen(step: int) -> str:
        if nfs.on_server("-name '*.tmp' -size +1M"):
            return "at work"
        return "over" if nfs.call("told")["committed"] == [1, step] else ""

    for at in range(committed, committed + 40, 2):
        nfs.call("train", at + 1, at + 2)
        if wait_for(functools.partial(seen, at + 2), what="the persist to write a pack") == "at work":
            return at
    raise AssertionError("no persist was seen at work")


@pytest.mark.parametrize(
    ("version", "options"),
    [("4.2", ""), ("3", ""), ("4.1", ",soft,timeo=10,retrans=1")],
)
def test_server_dies_in_the_middle_of_a_persist_training_goes_on_and_the_commit_follows(
    nfs: Nfs, version: str, options: str
) -> None:
    """Mounted hard (the default) every call waits for the server; mounted soft they fail, and the daemon tries again."""
    assert version in VERSIONS
    nfs.call("start_job", nfs.folder)
    nfs.call("train", 1, 2)
    assert not nfs.call("wait", 60)

    at = trained_until_a_pack_is_written(nfs, 2)
    nfs.network.server.kill()
    nfs.call("train", at + 3, at + 4, at + 5)
    nfs.call("fence")
    wait_for(lambda: nfs.call("told")["snapshot"] == [1, at + 5], what="the memory tier to go on")
    before = [1, at], [1, at + 2]  # the second where that commit was faster than the kill: then the next persist is cut
    assert nfs.call("told")["committed"] in before
    if options:
        wait_for(lambda: nfs.call("told")["failed"], deadline_s=100, what="the persist to fail")
        assert nfs.call("wait", 60)
    nfs.start()

    nfs.call("train", at + 6)
    wait_for(lambda: not nfs.call("wait", 100, deadline_s=120), deadline_s=120, what="the commit")
    told = nfs.call("told")
    assert not told["error"]
    assert told["failed"] == bool(options), "said once"
    wait_for(lambda: len(nfs.on_server("-name '*.fck'")) == 2, what="retention, which no commit waits for")
    steps = nfs.call("checkpoints", nfs.folder, client=nfs.other)
    assert nfs.call("restored") == steps[-1] == at + 6
    assert len(steps) == len(set(steps)) == 2
    code, said = nfs.call("verify", nfs.folder)
    assert code == 0, said
    assert nfs.call("finish") == []
    swept = nfs.call("sweep", nfs.folder)
    assert not swept or options, "mounted soft, a temporary file cannot be removed either while the server is dead"
    assert not nfs.left_behind()
