"""Servers that lack something of S3, through both clients: commits, retention and sweeps on them; each lack is said once."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from support.s3_stub import s3_stub
from support.slots import make_pin, shard

from flashckpt.checkpoint.catalog import list_checkpoints
from flashckpt.checkpoint.retention import Policy
from flashckpt.checkpoint.sweeping import sweep
from flashckpt.checkpoint.writer import commit, persist_slot, prefix_of
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.daemon.persister.housekeeping import sweep_root
from flashckpt.errors import DamagedError, ObjectMissingError
from flashckpt.storage import conditional, s3_session
from flashckpt.storage.factory import open_store
from flashckpt.storage.store import Store

both = pytest.mark.parametrize("client", ["s3fs", "obstore"])
UNKNOWN = [(501, "NotImplemented"), (405, "MethodNotAllowed")]
LACKS: list[dict[str, Any]] = [
    {},
    *({"refused": {kind: (501, "NotImplemented")}} for kind in ("batch", "uploads", "condition")),
    {"refused": {"batch": (400, "MalformedXML"), "uploads": (405, "MethodNotAllowed")}},
    {"ignores_conditions": True},
    {"keeps_folders": True},
    {"range_error": (400, "InvalidArgument")},
    {"ignores_conditions": True, "keeps_folders": True, "refused": {"batch": (405, ""), "uploads": (501, "")},
     "range_error": (500, "InternalError")},
]  # fmt: skip


def named(lack: dict[str, Any]) -> str:
    return "-".join(f"{name}:{value}" for name, value in lack.items()) or "nothing"


def make(store: Store, *steps: int) -> None:
    for step in steps:
        prefix = prefix_of(1, step)
        persist_slot(make_pin([shard("w", (4000,))], step=step), store, prefix)
        commit(store, prefix, [0])


def steps_of(store: Store) -> list[int]:
    return [info.step for info in list_checkpoints(store)][::-1]


@both
@pytest.mark.parametrize("lack", LACKS, ids=named)
def test_whole_life_of_a_root(
    lack: dict[str, Any], client: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(conditional, "SETTLE_S", 0.0)
    s3_session.say_once.cache_clear()
    with s3_stub(**lack) as stub, caplog.at_level(logging.WARNING, "flashckpt"):
        for number in (1, 2) if stub.refused else (1,):  # as the daemon does: a connection for each pass
            store = open_store("s3://bucket/run", **stub.options(backend=client))
            store.check()
            assert store.is_conditional == ("condition" not in stub.refused and not stub.ignores_conditions)
            assert store.put_if_absent(f"claim{number}", b"x")
            assert not store.put_if_absent(f"claim{number}", b"y")
            make(store, 10 * number, 10 * number + 1)
            orphan = prefix_of(1, number)
            store.put(f"{orphan}/r00000.p0.fck", b"never committed")
            assert sweep(store, older_than_s=0).orphans == (orphan,)
            sweep_root(store, Policy(keep_last=1), SnapshotId(1, 10 * number + 1))
            assert steps_of(store) == [10 * number + 1]
            assert not any(info.key.startswith(f"{orphan}/r") for info in store.list())
            assert "probe" not in store.folders()
            with pytest.raises(DamagedError, match="truncated"):
                store.get_range("claim1", 5, memoryview(bytearray(4)))
            with pytest.raises(ObjectMissingError):
                store.get_range("absent", 5, memoryview(bytearray(4)))
            store.close()
    said = [record.getMessage() for record in caplog.records]
    lacks = {"batch": "has no batch delete", "uploads": "cannot list unfinished uploads"}
    for kind, words in lacks.items():
        assert sum(words in text for text in said) == (kind in stub.refused)
