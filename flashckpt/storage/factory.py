"""`open_store`: from a root URL to the backend that serves it; those outside the core are found by entry points."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from flashckpt import entry_points
from flashckpt.errors import ConfigError, FlashckptError
from flashckpt.shm.job_id import local_path, root_url, scheme_of
from flashckpt.storage.store import Store, StoreType

_MEMORY_ONLY = ("memory",)
S3_OPTIONS = frozenset({
    "anon", "endpoint_url", "key", "secret", "token", "use_ssl", "client_kwargs", "requester_pays", "default_block_size",
    "default_fill_cache", "default_cache_type", "version_aware", "config_kwargs", "s3_additional_kwargs", "session",
    "username", "password", "cache_regions", "max_concurrency", "fixed_upload_size", "local_expiry_check",
    "conditional", "retries", "timeout_s", "backend",
})  # fmt: skip
"""Storage options of s3://: those of s3fs (which silently accepts any other name), and ours."""
_KINDS: dict[str, tuple[Callable[[Any], object], str]] = {
    **dict.fromkeys(("anon", "requester_pays", "use_ssl", "conditional", "cache_regions", "version_aware"),
                    (lambda value: {True: 1, False: 0}[value], "true or false")),
    **dict.fromkeys(("client_kwargs", "config_kwargs", "s3_additional_kwargs"),
                    (lambda value: {**value}, 'names and values, e.g. {"region_name": "eu-west-1"}')),
    "retries": (lambda value: 1 / max(int(value), 0), "a number from 1"),
    "timeout_s": (lambda value: 1 / max(float(value), 0), "seconds, above 0"),
}  # fmt: skip
"""By option of s3:// a use that fails for a value of another kind, and the right kind in words."""
_COMMON = ("file", "s3", "s3a", "gs", "gcs", "az", "abfs", "memory")
"""Protocols that are known without importing fsspec, and that no plug-in takes over."""


def open_store(url: str | Path, *, backend: str = "auto", **options: object) -> Store:
    """Return the store behind a root URL or path, without touching it yet.

    Args:
        url: A path, file://, s3://, the scheme of a plug-in (webhdfs://), or any other fsspec protocol (gs://, az://, memory://).
        backend: For s3:// only: "s3fs", "obstore", or "auto" (obstore where it is installed).
        options: fsspec's names (key, secret, token, endpoint_url, client_kwargs, ...) for object
            stores, and `conditional`, `retries`, `timeout_s`; none for directories.

    Raises:
        ConfigError: the URL cannot be a root, or an option is unknown.
    """
    text = root_url(url)
    protocol = scheme_of(text)
    check_options(text, options)
    if protocol == "file":
        from flashckpt.storage.posix import PosixStore

        return PosixStore(Path(local_path(text)))
    if protocol in ("s3", "s3a"):
        return _open_s3(text, backend, options)
    if (kind := _plugged(protocol)) is not None:
        return kind(text, options)
    from flashckpt.storage.fsspec_store import FsspecStore

    return FsspecStore(text, options)


def open_in_rank(url: str, options: Mapping[str, object]) -> Store:
    """Open a root as `open_store` does, but s3:// through s3fs unless the options name a client.

    A program that trains forks the workers of its loaders, and obstore's runtime, if it was used before, hangs in them.
    """
    others = dict(options)
    backend = others.pop("backend", "auto")
    return open_store(url, backend="s3fs" if backend == "auto" else str(backend), **others)


def place_of(url: str, options: Mapping[str, object]) -> str:
    """Return endpoint and region of an s3:// root for a message; "" for another root, or where that is unknown."""
    if scheme_of(url) not in ("s3", "s3a"):
        return ""
    store = open_in_rank(url, options)
    try:
        return str(getattr(store, "address", ""))
    except FlashckptError:
        return ""


def is_process_local(url: str) -> bool:
    """Return whether the root is process-local (memory://): no daemon could write to it."""
    return scheme_of(url) in _MEMORY_ONLY


def check_options(url: str, options: Mapping[str, object]) -> None:
    """Reject invalid roots and storage options before they are used.

    Raises:
        ConfigError: Options are given for a directory, s3:// has no such option, or nothing knows the protocol.
    """
    protocol = scheme_of(url)
    if protocol == "file" and (unknown := sorted(options)):
        raise ConfigError(
            f"the root {url} is a directory and takes no storage options",
            found=", ".join(unknown),
            remedy="remove storage_options, or give an s3:// or gs:// root",
        )
    known = S3_OPTIONS if protocol in ("s3", "s3a") else None
    if (kind := _plugged(protocol)) is not None:
        known = kind.OPTIONS
        if (check_url := getattr(kind, "check_url", None)) is not None:
            check_url(url)
    if known is not None and (unknown := sorted(set(options) - known)):
        near = [name for one in unknown for name in difflib.get_close_matches(one, known, 1)]
        raise ConfigError(
            f"the root {url} has no such storage option",
            found=", ".join(unknown),
            expected=", ".join(near or sorted(known)),
            remedy="storage options have the names that the client of the protocol gives them",
        )
    if known is S3_OPTIONS:
        _refuse_values(url, options)
    if protocol not in _COMMON and kind is None:
        _refuse_unknown_protocol(url, protocol)


def _refuse_values(url: str, options: Mapping[str, object]) -> None:
    for name, value in options.items():
        use, expected = _KINDS.get(name, (None, ""))
        try:
            if use is not None and value is not None:
                use(value)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise ConfigError(
                f"the storage option {name} of {url} cannot be that", found=repr(value), expected=expected
            ) from error


def _plugged(protocol: str) -> StoreType | None:
    """Return the class of stores that a plug-in, ours or another's, has for a protocol."""
    if protocol in _COMMON or (entry := entry_points.find(entry_points.STORES, protocol)) is None:
        return None
    kind: StoreType = entry.load()
    return kind


def _refuse_unknown_protocol(url: str, protocol: str) -> None:
    from fsspec.registry import known_implementations, registry

    if protocol not in known_implementations and protocol not in registry:
        raise ConfigError(
            f"the root {url} cannot be opened: its protocol is not known",
            found=f"{protocol}://",
            expected="a path, s3://, gs://, az://, or a protocol that fsspec knows",
            remedy="install the package that brings it, and register it with fsspec",
        )


def _open_s3(url: str, backend: str, options: dict[str, object]) -> Store:
    from flashckpt.storage.s3 import S3Store
    from flashckpt.storage.s3_address import fsspec_defaults

    if backend not in ("auto", "s3fs", "obstore"):
        raise ConfigError(f"unknown S3 backend {backend!r}", expected="auto, s3fs or obstore")
    options = {**fsspec_defaults(), **options}
    if backend == "s3fs":
        return S3Store(url, options)
    if (open_usable := entry_points.optional("s3-obstore")) is not None and (
        store := open_usable(url, options)
    ) is not None:
        return cast("Store", store)
    if backend == "obstore":
        raise ConfigError(
            "the S3 backend obstore cannot be used here",
            found="not installed, used before a fork, or an option only s3fs knows",
            remedy='pip install "flashckpt[fast]", or backend="s3fs"',
        )
    return S3Store(url, options)
