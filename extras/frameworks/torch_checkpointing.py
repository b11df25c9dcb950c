"""torch_checkpointing on any root, by one line of its config: durable, verified, committed by one write.

    manager = CheckpointManager(CheckpointManager.Config(storage_config=FlashStorageConfig("s3://bucket/run8")))
    manager.save("step_1200", {"model": model.state_dict(), "step": 1200})

What is copied, when, and under which lock stays the library's, as do its files: `flashckpt import` reads those that it
wrote itself.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch_checkpointing.storage.base_storage import ReadArgs, Storage, StorageConfig
from typing_extensions import Buffer

from flashckpt.errors import ConfigError
from flashckpt.integrations.committed_files import PART_BYTES, CommittedFiles
from flashckpt.storage.factory import local_path, open_in_rank, root_url, scheme_of


@dataclass
class FlashStorageConfig(StorageConfig):  # type: ignore[misc]  # torch_checkpointing is not there when types are checked
    """Where a manager of torch_checkpointing saves and loads.

    Attributes:
        root: A directory, s3://bucket/run, gs://...: paths that the manager is given are below it, with or without it.
        storage_options: As `Checkpointer`.
    """

    root: str
    storage_options: dict[str, Any] = field(default_factory=dict, repr=False)

    def create_storage(self) -> FlashStorage:
        """Return the storage, in the process that uses it."""
        return FlashStorage(self.root, self.storage_options)


class FlashStorage(Storage):  # type: ignore[misc]  # as above
    """What torch_checkpointing asks of a storage."""

    def __init__(self, root: str, storage_options: Mapping[str, Any]) -> None:
        self._url = root_url(root)
        self._files = CommittedFiles(open_in_rank(self._url, storage_options))
        names = {str(root), self._url}
        if scheme_of(self._url) == "file":
            names |= {local_path(self._url), os.path.abspath(local_path(str(root)))}  # noqa: PTH100 -- links stay
        self._names = sorted({str(Path(name)) for name in names}, key=len, reverse=True)

    @property
    def mmap_fill_chunk_bytes(self) -> int:
        """Ranges that cut no part."""
        return PART_BYTES

    def _key(self, path: str | os.PathLike[str]) -> str:
        text = os.path.normpath(str(Path(path)))
        for name in self._names:
            if text == name or text.startswith(f"{name}/"):
                text = text[len(name) :].lstrip("/") or "."
                break
        if text.startswith(("/", "..")):
            raise ConfigError(
                f"the path {text} is not below the root {self._url}",
                expected="a path below it, or relative to it",
                remedy="give FlashStorageConfig the folder that all checkpoints are in",
            )
        return text

    def stream_read(self, path: Path, read_args: ReadArgs | None = None) -> io.RawIOBase:
        """Return a stream that verifies what it returns."""
        stream = self._files.read(self._key(path))
        if read_args is None or read_args.pre_read_full_file:
            return io.BytesIO(stream.readall())  # type: ignore[return-value]  # as the library's own storage does
        return stream

    def stream_write(self, path: Path) -> io.IOBase:
        """Return a stream; the file is there at the end of its `with` block."""
        return self._files.write(self._key(path))

    def write(self, path: Path, data: Buffer) -> None:
        """Write a file."""
        with self._files.write(self._key(path)) as stream:
            stream.write(data)

    def rename(
        self,
        src_path: Path,
        dst_path: Path,
        is_directory: bool = False,
        background_cleanup: bool = False,  # noqa: ARG002 -- the same
    ) -> None:
        """Commit a folder, or rename a file."""
        move = self._files.commit if is_directory else self._files.rename_file
        move(self._key(src_path), self._key(dst_path))

    def mkdir(self, path: Path, recursive: bool = True) -> None:
        """Do nothing: folders are names."""

    def rmdir(self, path: Path) -> None:
        """Remove a folder with all in it."""
        self._files.remove(self._key(path))

    def delete(self, path: Path) -> None:
        """Remove a file of a folder that is not committed."""
        self._files.delete(self._key(path))

    def ls(self, path: Path) -> list[str]:
        """Return the names in a folder."""
        return self._files.names(self._key(path))

    def exists(self, path: Path) -> bool:
        """Return whether there is a file or a folder."""
        return self._files.exists(self._key(path))

    def isdir(self, path: Path) -> bool:
        """Return whether there is a folder."""
        return self._files.is_folder(self._key(path))

    def getsize(self, path: Path) -> int:
        """Return the bytes of a file."""
        return self._files.read(self._key(path)).nbytes

    def remap_path(self, path: Path) -> str:
        """Return the URL of a path."""
        return f"{self._url}/{self._key(path)}"


__all__ = ["FlashStorage", "FlashStorageConfig"]
