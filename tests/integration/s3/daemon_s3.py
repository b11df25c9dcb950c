"""The daemon on an S3 root: commits, and an endpoint that goes away and comes back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.daemons import assert_bitwise
from support.memory_tier import FakeJob
from support.proxy import Proxy
from support.ranks import wait_for
from support.s3 import CLIENTS, moto_server, start_moto, stop

from flashckpt.checkpoint.catalog import list_checkpoints
from flashckpt.errors import FlashckptError


@pytest.mark.usefixtures("default_client")
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
            job.directory.ensure_daemon()  # not forked: obstore may have been used in this process
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
            end(job)


@pytest.mark.usefixtures("default_client")
def test_credentials_expire_while_the_daemon_lives_and_their_successors_are_taken_up_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come from a file that something else renews, as SSO and sidecars do; the daemon is never told."""
    file = tmp_path / "credentials"

    def renew(key: str) -> None:
        new = file.with_suffix(".new")
        new.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = s\n")
        new.rename(file)

    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    renew("first")
    with moto_server() as server, Proxy(server.endpoint) as proxy:
        options = server.options(endpoint_url=proxy.endpoint, retries=2, timeout_s=5.0)
        job = FakeJob(
            f"s3://{server.bucket}/run",
            storage_options={k: v for k, v in options.items() if k not in ("key", "secret")},
        )
        store = server.open("run")

        def committed() -> list[int]:
            return [info.step for info in list_checkpoints(store)]

        def said() -> str:
            status = job.directory.read_status()
            return status.error if status is not None else ""

        try:
            job.directory.ensure_daemon()  # not forked: obstore may have been used in this process
            job.step(10, persist=True)
            wait_for(lambda: committed() == [10], what="the first commit", deadline_s=60)
            proxy.refused_key = "first"
            assert job.step(20, persist=True)
            wait_for(lambda: "were refused" in said(), what="the failure", deadline_s=60)
            assert job.step(25), "the memory tier goes on"
            assert committed() == [10]
            renew("second")
            wait_for(lambda: 20 in committed(), what="the next commit", deadline_s=90)
            wait_for(lambda: not said(), what="the error to go")
            proxy.refused_key = None
            assert_bitwise(job, (1, 20))
        finally:
            end(job)


def end(job: FakeJob) -> None:
    job.directory.request("ended")
    job.die()
    wait_for(lambda: not job.directory.path.exists(), what="the daemon to end", deadline_s=60)


def test_a_program_without_obstore_and_one_with_it_take_the_client_that_is_meant(default_client: str) -> None:
    """What the tests above rely on, for the daemon is such a program."""
    code = "from flashckpt.storage.factory import open_store; print(type(open_store('s3://bucket/run')).__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == CLIENTS[default_client]


@pytest.fixture(autouse=True)
def _plain_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
