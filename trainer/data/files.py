"""The files that a path, a pattern or a URL names, here or on any storage of fsspec. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from flashckpt.errors import DataError
from flashckpt.sampler.datasets.reaching import may_pass, reach
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

    def matching() -> list[str]:
        if has_pattern(path):
            return sorted(name for name in filesystem.glob(path) if filesystem.isfile(name))
        return [path] if _is_file(filesystem, path) else []

    found = reach(url, matching, "one file or more", forget=filesystem.invalidate_cache)
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

    filesystem, path = reach(url, lambda: fsspec.core.url_to_fs(os.fspath(url), **storage_options))
    return filesystem, path


def _is_file(filesystem: Any, path: str) -> bool:
    """Return what `isfile` does, which takes any error for a missing file."""
    try:
        return bool(filesystem.info(path)["type"] == "file")
    except FileNotFoundError as error:
        if may_pass(error):
            raise
        return False


def full_name(filesystem: Any, url: str, path: str) -> str:
    """Return a path of the file system of `url` as what can be opened: a URL, or a local path."""
    return str(filesystem.unstrip_protocol(path)) if is_remote(url) else path
