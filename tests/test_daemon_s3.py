"""The daemon on an S3 root: commits, and an endpoint that goes away and comes back."""

from __future__ import annotations

import pytest
from support.daemons import assert_bitwise, forked
from support.memory_tier import FakeJob
from support.ranks import wait_for
from support.s3 import moto_server, start_moto, stop

from flashckpt.checkpoint.checkpoints import list_checkpoints
from flashckpt.daemon import service
from flashckpt.errors import FlashckptError


def test_endpoint_stops_and_starts_again_empty_the_next_persist_succeeds_by_itself() -> None:
    with moto_server() as server:
        root = f"s3://{server.bucket}/run"
        job = FakeJob(root, storage_options=server.options(retries=1, timeout_s=2.0))
        store = server.open("run")

        def committed() -> list[int]:
            try:
                return [info.step for info in list_checkpoints(store)]
            except FlashckptError:
                return []

        try:
            with forked(job, times=service.Times()):
                job.step(10, persist=True)
                wait_for(lambda: committed() == [10], what="the first commit", deadline_s=60)
                assert_bitwise(job, (1, 10))
                stop(server)
                assert job.step(20, persist=True)
                wait_for(lambda: (s := job.directory.read_status()) and s.error, what="the failure", deadline_s=60)
                assert job.step(25), "the memory tier goes on"
                start_moto(server, int(server.endpoint.rpartition(":")[2]))
                server.make_bucket()  # moto keeps nothing
                wait_for(lambda: 20 in committed(), what="the next commit", deadline_s=90)
            assert_bitwise(job, (1, 20))
            status = job.directory.read_status()
            assert status is not None
            assert status.failures >= 1
        finally:
            job.die()


@pytest.fixture(autouse=True)
def _plain_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
