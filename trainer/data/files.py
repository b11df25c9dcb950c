"""The files that a path, a pattern or a URL names, here or on any storage of fsspec. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from flashckpt.errors import DataError
from flashckpt.sampler.datasets.remote_file import is_remote


def has_pattern(url: str) -> bool:
    """Return whether a URL stands for the files that match it."""
    return any(sign in url for sign in "*?[")


def matching_files(url: str, storage_options: Mapping[str, Any]) -> list[str]:
    """Return the files that `url` names, as URLs or absolute paths, sorted.

    Raises:
        DataError: there is none, or the storage cannot be asked.
    """
    filesystem, path = file_system(url, storage_options)
    try:
        if has_pattern(path):
            found = sorted(name for name in filesystem.glob(path) if filesystem.isfile(name))
        else:
            found = [path] if filesystem.isfile(path) else []
    except Exception as error:
        raise unreadable(url, error) from error
    if not found:
        raise DataError(
            f"no file matches {url!r}",
            found="0 files",
            expected="one file or more",
            state="Nothing was started.",
            remedy="correct data.sources.urls; paths are relative to the folder in which the command starts",
        )
    return [full_name(filesystem, url, name) for name in found]


def file_system(url: str, storage_options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the file system of a URL and the path in it.

    Raises:
        DataError: there is no such file system, or it refuses the options.
    """
    import fsspec

    try:
        filesystem, path = fsspec.core.url_to_fs(os.fspath(url), **storage_options)
    except Exception as error:
        raise unreadable(url, error) from error
    return filesystem, path


def full_name(filesystem: Any, url: str, path: str) -> str:
    """Return a path of the file system of `url` as what can be opened: a URL, or a local path."""
    return str(filesystem.unstrip_protocol(path)) if is_remote(url) else path


def unreadable(url: str, error: Exception) -> DataError:
    """Return the error for a file that cannot be read."""
    return DataError(
        f"{url} cannot be read",
        found=f"{type(error).__name__}: {error}",
        expected="a readable file",
        remedy="check the path, the kind and the access",
    )
