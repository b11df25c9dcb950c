"""The process of `persist.py --s3` that uploads and downloads: flashckpt through obstore and s3fs, the two libraries alone, boto3."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from persist_rank import EXTENT, PREFIX, READ_THREADS, State, timing

from flashckpt.bench.worker import serve
from flashckpt.checkpoint.catalog import read_manifest
from flashckpt.checkpoint.writer import commit, persist_slot
from flashckpt.restore.executor import execute_reads
from flashckpt.restore.sources import StorageSource
from flashckpt.storage.factory import open_store
from flashckpt.storage.store import Store

PARTS = 4  # of 16 MiB at once, by everybody
PATIENT_S = 120


class Client:
    """What the parent may order. boto3 and the libraries alone upload a file that lies in memory, flashckpt the slot itself."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.endpoint, self.shm = config["endpoint"], Path(config["shm"])
        self.state = State(int(config["bytes"]), 0, 1, self.shm)
        self.bucket = f"flashckpt-bench-{os.getpid()}"
        self.s3 = self._boto3()
        self.s3.create_bucket(Bucket=self.bucket)
        self.source, self.target = self.shm / "upload", self.shm / "download"
        self.source.write_bytes(self.state.pin.data)

    def _boto3(self) -> Any:
        import boto3
        from botocore.config import Config

        config = Config(
            s3={"addressing_style": "path"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            read_timeout=PATIENT_S,
        )
        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "testtest", "region_name": "us-east-1"}
        return boto3.client("s3", endpoint_url=self.endpoint, config=config, **keys)

    def ways(self) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
        """Return upload and download by name; "boto3" is the limit."""
        from boto3.s3.transfer import TransferConfig

        config = TransferConfig(multipart_chunksize=EXTENT, max_concurrency=PARTS)
        name, file, key = self.bucket, str(self.source), "boto3/object"
        return {
            "boto3": (
                lambda: self.s3.upload_file(file, name, key, Config=config),
                lambda: self.s3.download_file(name, key, str(self.target), Config=config),
            ),
            "flashckpt, obstore": (lambda: self._persist("obstore"), lambda: self._restore("obstore")),
            "flashckpt, s3fs": (lambda: self._persist("s3fs"), lambda: self._restore("s3fs")),
            "obstore alone": (self._obstore_put, self._obstore_get),
            "s3fs alone": (self._s3fs_put, self._s3fs_get),
        }

    def up(self, way: str) -> dict[str, float]:
        """Upload once."""
        self._remove(way)
        return timing(self.ways()[way][0])

    def down(self, way: str) -> dict[str, float]:
        """Download once."""
        found = timing(self.ways()[way][1])
        if way.startswith("flashckpt") and not self.state.is_restored():
            raise AssertionError(f"{way}: restored bytes differ")
        self.target.unlink(missing_ok=True)
        return found

    def close(self) -> None:
        """Remove all objects, the bucket and the slot."""
        for way in self.ways():
            self._remove(way)
        pages = self.s3.get_paginator("list_objects_v2").paginate(Bucket=self.bucket)
        for one in [item["Key"] for page in pages for item in page.get("Contents", [])]:
            self.s3.delete_object(Bucket=self.bucket, Key=one)
        self.s3.delete_bucket(Bucket=self.bucket)
        shutil.rmtree(self.shm, ignore_errors=True)

    def _remove(self, way: str) -> None:
        if way.startswith("flashckpt"):
            store = self._store(way.rpartition(" ")[2])
            for info in store.list(f"{PREFIX}/"):
                store.delete(info.key)

    def _store(self, backend: str) -> Store:
        if backend not in _stores:
            options = {"endpoint_url": self.endpoint, "key": "test", "secret": "testtest"}
            _stores[backend] = open_store(f"s3://{self.bucket}/{backend}", backend=backend, **options)
        return _stores[backend]

    def _persist(self, backend: str) -> None:
        store = self._store(backend)
        persist_slot(self.state.pin, store, PREFIX)
        assert commit(store, PREFIX, [0])

    def _restore(self, backend: str) -> None:
        store = self._store(backend)
        source = StorageSource(store, read_manifest(store, PREFIX), PREFIX)
        execute_reads(self.state.targets, [source], threads=READ_THREADS)

    def _obstore(self) -> Any:
        from obstore.store import S3Store

        if "obstore" not in _alone:
            _alone["obstore"] = S3Store(
                self.bucket,
                endpoint=self.endpoint,
                access_key_id="test",
                secret_access_key="testtest",
                region="us-east-1",
                virtual_hosted_style_request=False,
                client_options={"allow_http": True, "timeout": f"{PATIENT_S}s"},
            )
        return _alone["obstore"]

    def _obstore_put(self) -> None:
        import obstore

        data = memoryview(self.state.pin.data)
        obstore.put(
            self._obstore(), "alone/obstore", data, use_multipart=True, chunk_size=EXTENT, max_concurrency=PARTS
        )

    def _obstore_get(self) -> None:
        import obstore

        size = len(self.state.pin.data)
        starts = list(range(0, size, EXTENT))
        obstore.get_ranges(
            self._obstore(), "alone/obstore", starts=starts, ends=[min(at + EXTENT, size) for at in starts], coalesce=0
        )

    def _s3fs(self) -> Any:
        import s3fs

        if "s3fs" not in _alone:
            config = {
                "request_checksum_calculation": "when_required",
                "response_checksum_validation": "when_required",
                "read_timeout": PATIENT_S,
            }
            _alone["s3fs"] = s3fs.S3FileSystem(
                key="test",
                secret="testtest",
                endpoint_url=self.endpoint,
                config_kwargs=config,
                skip_instance_cache=True,
                use_listings_cache=False,
            )
        return _alone["s3fs"]

    def _s3fs_put(self) -> None:
        self._s3fs().put_file(str(self.source), f"{self.bucket}/alone/s3fs", chunksize=EXTENT, max_concurrency=PARTS)

    def _s3fs_get(self) -> None:
        self._s3fs().get_file(f"{self.bucket}/alone/s3fs", str(self.target), chunksize=EXTENT, max_concurrency=PARTS)


_stores: dict[str, Store] = {}
_alone: dict[str, Any] = {}


def commands(config: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """Make the client; return what the parent may order."""
    warnings.simplefilter("ignore")
    client = Client(config)
    return {"ways": lambda: list(client.ways()), "up": client.up, "down": client.down, "close": client.close}


if __name__ == "__main__":
    serve(commands)
