"""The options of s3:// roots, and the choice between their two clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flashckpt.errors import ConfigError
from flashckpt.storage.store import Store

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


class S3Roots:
    """The store of a root is that of s3fs or of obstore, as its option `backend` says."""

    OPTIONS = S3_OPTIONS

    def __new__(cls, url: str, options: dict[str, Any]) -> Store:  # type: ignore[misc]  # it is called as a class of stores
        """Return the store of a root, without touching it yet."""
        from flashckpt.stores.s3 import S3Store
        from flashckpt.stores.s3_address import fsspec_defaults

        options = {**fsspec_defaults(), **options}
        backend = options.pop("backend")
        if backend not in ("auto", "s3fs", "obstore"):
            raise ConfigError(f"unknown S3 backend {backend!r}", expected="auto, s3fs or obstore")
        if backend == "s3fs":
            return S3Store(url, options)
        from flashckpt.stores.obstore_store import open_usable

        return open_usable(url, options, is_asked=backend == "obstore") or S3Store(url, options)

    @staticmethod
    def check_values(url: str, options: Mapping[str, object]) -> None:
        """Raise ConfigError for a value of another kind than its option has."""
        for name, value in options.items():
            use, expected = _KINDS.get(name, (None, ""))
            try:
                if use is not None and value is not None:
                    use(value)
            except (ArithmeticError, LookupError, TypeError, ValueError) as error:
                raise ConfigError(
                    f"the storage option {name} of {url} cannot be that", found=repr(value), expected=expected
                ) from error
