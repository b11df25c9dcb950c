"""s3:// through obstore (the `fast` extra): less CPU for uploads than s3fs, and no copies of the parts.

Measured (docs/storage.md): 1.36 CPU s/GB for an upload against 1.96; downloads cost the same through both.

Deletions, the sweep of multipart uploads, roots that botocore alone finds (`s3_address`), and every call in a process
that was forked after obstore had been used (its runtime's threads do not survive a fork) go through s3fs.
"""

from __future__ import annotations

import datetime as dt
import functools
import importlib.util
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar
from urllib.parse import unquote

import numpy as np

from flashckpt.environment import env
from flashckpt.errors import ConfigError, FlashckptError, ObjectMissingError, RootError
from flashckpt.storage.conditional import require_restartable, truncated
from flashckpt.storage.direct_io import extents
from flashckpt.storage.store import (
    PART_BYTES,
    PARTS_IN_FLIGHT,
    Names,
    ObjectInfo,
    Objects,
    check_key,
)
from flashckpt.stores.obstore_answers import HEAD_REFUSED, NOT_ABORTED, OF_OTHER_PLACE, status_of, translated
from flashckpt.stores.s3 import S3Store
from flashckpt.stores.s3_address import GIVEN_CREDENTIALS, client_arguments
from flashckpt.stores.s3_errors import STALE, no_credentials
from flashckpt.stores.s3_session import say_once, split_s3

_OPTIONS = {
    "key", "secret", "token", "endpoint_url", "client_kwargs", "retries", "timeout_s", "conditional", "anon", "requester_pays",
    "s3_additional_kwargs", "config_kwargs",
}  # fmt: skip
_ADDITIONAL = {"ServerSideEncryption": "server_side_encryption", "SSEKMSKeyId": "sse_kms_key_id"}
"""Those of `s3_additional_kwargs` that obstore can say, by its name for each."""
_INSIDE = {
    "client_kwargs": ("region_name", "endpoint_url", *GIVEN_CREDENTIALS),
    "s3_additional_kwargs": _ADDITIONAL, "config_kwargs": ("s3",), "config_kwargs.s3": ("addressing_style",),
}  # fmt: skip
_OF_S3 = "aws_endpoint_url_s3"  # a variable that versions of obstore which know it prefer to any endpoint
_log = logging.getLogger(__name__)

_first_pid = 0
_has_warned = False


_P = ParamSpec("_P")
_R = TypeVar("_R")


class _OnlyByS3fsError(Exception):
    """An answer that obstore can do nothing with.

    Args:
        stays: It will be the same for the next request.
    """

    def __init__(self, *, stays: bool) -> None:
        super().__init__()
        self.stays = stays


def _or_by_s3fs(
    method: Callable[Concatenate[ObstoreStore, Any, _P], _R],
) -> Callable[Concatenate[ObstoreStore, _P], _R]:
    """Give a method obstore's client; where there is none to use, or an answer needs s3fs, call that of S3Store."""
    by_s3fs = getattr(S3Store, method.__name__)

    @functools.wraps(method)
    def call(self: ObstoreStore, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if (client := self._client()) is not None:
            try:
                return method(self, client, *args, **kwargs)
            except _OnlyByS3fsError as error:
                self._is_left = error.stays
            if self._is_left:
                say_once("%s is in another region than configured, or wants checksums: it goes through s3fs", self.url)
        result: _R = by_s3fs(self, *args, **kwargs)
        return result

    return call


def why_not(url: str, options: Mapping[str, Any]) -> tuple[str, str]:
    """Return why obstore cannot be used for a root, and what to do; "" and "" where it can."""
    given = {**options, "config_kwargs.s3": (options.get("config_kwargs") or {}).get("s3")}
    foreign = {
        f"{outer}.{name}" for outer, known in _INSIDE.items() for name in set(given.get(outer) or {}) - set(known)
    }
    foreign, prefix = foreign | (set(options) - _OPTIONS), split_s3(url)[1]
    if foreign:
        return f"{', '.join(sorted(foreign))}: only s3fs knows it", 'backend="s3fs", or leave it out'
    if prefix and not {"", ".", ".."}.isdisjoint(prefix.split("/")):
        return f"the prefix {prefix!r}: only s3fs takes it", 'backend="s3fs", or another prefix'
    if importlib.util.find_spec("obstore") is None:
        return "it is not installed", 'pip install "flashckpt[fast]", or backend="s3fs"'
    if _first_pid not in (0, os.getpid()):
        return (
            "this process was forked after obstore had been used",
            'multiprocessing_context="forkserver", or backend="s3fs"',
        )
    return "", ""


def open_usable(url: str, options: dict[str, Any], *, is_asked: bool = False) -> ObstoreStore | None:
    """Return the store of a root; None where obstore cannot be used.

    Raises:
        ConfigError: It cannot, and the program asks for it.
    """
    reason, remedy = why_not(url, options)
    if not reason:
        return ObstoreStore(url, options)
    if is_asked:
        raise ConfigError(f"the S3 backend obstore cannot be used for {url}", found=reason, remedy=remedy)
    return None


class ObstoreStore(S3Store):
    """The same objects under the same keys as S3Store, moved by obstore."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        super().__init__(url, options)
        self._obstore: Any = None
        self._is_left = False  # for s3fs

    @_or_by_s3fs
    def put(self, store: Any, key: str, data: bytes) -> None:
        """Publish a small object by one PUT."""
        self._do(key, lambda obs: self._put_small(obs, store, key, bytes(data)))

    def _put_small(self, obs: Any, store: Any, key: str, body: bytes, **condition: str) -> None:
        """One PUT; if the server's tag raises doubt the object is read back."""
        tag = obs.put(store, check_key(key), body, use_multipart=False, **condition)["e_tag"]
        if self._tags.doubt(tag, body):
            stored = bytes(obs.get(store, key).bytes())
            self._tags.settle(self.url, key, tag=tag, body=body, stored=stored)

    @_or_by_s3fs
    def put_object(self, store: Any, key: str, parts: Iterable[memoryview], nbytes: int | None = None) -> None:
        """Upload a large object in parts of 16 MiB, four in flight; obstore aborts a failed upload."""
        parts = require_restartable(parts)
        if self._unaborted:
            self._call(key, self._abort_earlier)

        def send(obs: Any) -> None:
            views = (view for _, view in extents(parts, PART_BYTES))
            first = next(views, memoryview(b""))
            if nbytes is not None and nbytes <= PART_BYTES:
                self._put_small(obs, store, key, b"".join((first, *views)))
            else:
                obs.put(
                    store,
                    check_key(key),
                    _chain(first, views),
                    chunk_size=PART_BYTES,
                    max_concurrency=PARTS_IN_FLIGHT,
                )

        self._do(key, send)

    @_or_by_s3fs
    def get(self, store: Any, key: str) -> bytes:
        """Return a whole small object."""
        return bytes(self._do(key, lambda obs: obs.get(store, check_key(key)).bytes()))

    @_or_by_s3fs
    def get_range(self, store: Any, key: str, start: int, out: memoryview) -> None:
        """Fill `out` by ranged reads, PARTS_IN_FLIGHT parts of 16 MiB at a time."""
        views = list(extents([out], PART_BYTES))
        for index in range(0, len(views), PARTS_IN_FLIGHT):
            group = views[index : index + PARTS_IN_FLIGHT]
            starts = [start + begin for begin, _ in group]
            lengths = [len(view) for _, view in group]
            with self._shown_the_end(key, start + len(out)):
                blocks = self._do(key, functools.partial(_ranges, store, key, starts, lengths))
            for begin, (_, view), block in zip(starts, group, blocks, strict=True):
                data = np.frombuffer(block, dtype=np.uint8)
                if len(data) != len(view):
                    raise truncated(self.url, key, found=f"{begin + len(data)} bytes", needed=start + len(out))
                np.copyto(np.frombuffer(view, dtype=np.uint8), data)

    @_or_by_s3fs
    def list(self, store: Any, prefix: str = "") -> Objects:
        """Return the objects under a prefix."""
        # obstore lists whole folders only: what follows the last slash of the prefix is filtered here
        folder = prefix.rpartition("/")[0] or None
        found = self._do(prefix, lambda obs: obs.list(store, folder).collect())
        infos = [
            ObjectInfo(key=entry["path"], nbytes=entry["size"], mtime=entry["last_modified"].timestamp())
            for entry in found
        ]
        infos = self._without_marks(infos)
        return sorted((info for info in infos if info.key.startswith(prefix)), key=lambda info: info.key)

    def _without_marks(self, infos: Objects) -> Objects:
        """Leave out the empty objects that mark folders, from whose names obstore takes the slash."""
        folders = {""} | {info.key[:at] for info in infos for at, char in enumerate(info.key) if char == "/"}

        def marks(info: ObjectInfo) -> bool:
            return info.key in folders or ("/" not in info.key and self.head(info.key) is None)

        return [info for info in infos if info.nbytes or not marks(info)]

    @_or_by_s3fs
    def folders(self, store: Any, prefix: str = "") -> Names:
        """Return the common prefixes directly under `prefix`."""
        answer = self._do(prefix, lambda obs: obs.list_with_delimiter(store, prefix.rstrip("/") or None))
        return self._not_empty(
            prefix, sorted(name.rstrip("/").rpartition("/")[2] for name in answer["common_prefixes"])
        )

    @_or_by_s3fs
    def head(self, store: Any, key: str) -> ObjectInfo | None:
        """Return size and time of an object."""
        try:
            entry = self._do(key, lambda obs: obs.head(store, check_key(key)))
        except ObjectMissingError:
            return None
        return ObjectInfo(key=key, nbytes=entry["size"], mtime=entry["last_modified"].timestamp())

    def close(self) -> None:
        """Forget the client; the next call opens another."""
        self._obstore = None
        super().close()

    @_or_by_s3fs
    def _create(self, store: Any, key: str, data: bytes) -> bool:
        from obstore.exceptions import AlreadyExistsError

        def create(obs: Any) -> bool | None:
            try:
                self._put_small(obs, store, key, bytes(data), mode="create")
            except AlreadyExistsError as error:
                return None if status_of(str(error)) == 409 else False
            return True

        # to obstore a conflict (409) is an object that is there; it is another write at the same time, which may fail
        created = self._do(key, create)
        return super()._create(key, data) if created is None else bool(created)

    def _client(self) -> Any:
        """Return the client of this process; None where only s3fs can be used: after a fork, or for where the root is."""
        global _first_pid  # noqa: PLW0603 -- obstore's runtime is one per process, and so is this mark
        if self._is_left or _first_pid not in (0, os.getpid()) or not self.address.is_plain:
            return None
        if self._obstore is None:
            from obstore.store import S3Store as Client

            if not _first_pid:
                os.register_at_fork(after_in_parent=_warn_of_fork)
            _first_pid = os.getpid()
            settings = self._settings()
            try:
                self._obstore = _made(Client, self.bucket, settings)
            except Exception as error:
                raise RootError(f"the root {self.url} cannot be opened", found=str(error)) from error
        return self._obstore

    def _settings(self) -> dict[str, Any]:
        """Return the arguments of the client. What is not said here, obstore would take from the environment itself."""
        address = self.address
        endpoint = address.url if address.is_virtual else address.endpoint
        settings: dict[str, Any] = {
            "config": {
                "endpoint": endpoint,
                **({_OF_S3: endpoint} if env.is_set(_OF_S3.upper()) else {}),
                "region": address.region,
                "virtual_hosted_style_request": address.is_virtual,
                "skip_signature": bool(self._options.get("anon")),
                "conditional_put": "etag",
                "request_payer": bool(self._options.get("requester_pays")),
                **{
                    _ADDITIONAL[name]: value
                    for name, value in (self._options.get("s3_additional_kwargs") or {}).items()
                },
            }
        }
        if not self._options.get("anon"):
            settings["credential_provider"] = CredentialChain(self.url, client_arguments(self._options))
        if self.prefix:
            settings["prefix"] = self.prefix
        settings["client_options"] = {
            "allow_http": address.endpoint.startswith("http://"),
            "timeout": dt.timedelta(seconds=2 * self._timeout_s),  # of a whole part, its body included
            "connect_timeout": dt.timedelta(seconds=min(10.0, self._timeout_s)),
        }
        settings["retry_config"] = {
            "max_retries": max(0, self._retries - 1),
            "backoff": {
                "init_backoff": dt.timedelta(seconds=0.2),
                "max_backoff": dt.timedelta(seconds=10),
                "base": 2,
            },
            "retry_timeout": dt.timedelta(seconds=4 * self._timeout_s),
        }
        return settings

    def _do(self, key: str, work: Callable[[Any], Any]) -> Any:
        import obstore as obs
        from obstore.exceptions import BaseError

        try:
            return work(obs)
        except FlashckptError:
            raise
        except (BaseError, OSError) as error:
            text = str(error).partition("\n\nDebug source")[0]
            stays = OF_OTHER_PLACE.search(text) is not None
            if stays or HEAD_REFUSED.search(text):
                raise _OnlyByS3fsError(stays=stays) from error
            if any(code in str(error) for code in STALE):
                self._obstore = None  # the next request asks for credentials again
            if upload := NOT_ABORTED.search(text):
                self._unaborted.append({"Bucket": self.bucket, "Key": self._key(key), "UploadId": unquote(upload[1])})
            raise translated(error, self.url, self.bucket, key) from error


class CredentialChain:
    """Gives obstore the keys of the options, else what botocore's chain finds: environment, profiles, SSO, instance roles.

    Asked again after five minutes, or when they expire before, so that expired or rotated credentials are replaced while
    the daemon runs: obstore renews what ends within five minutes, at every request.
    """

    REFRESH_S = 600.0

    def __init__(self, url: str, given: Mapping[str, Any] | None = None) -> None:
        self._url = url
        self._given = {name: str((given or {}).get(name) or "") for name in GIVEN_CREDENTIALS}

    def __call__(self) -> dict[str, Any]:
        """Return access key, secret, token and the time to ask again."""
        key, secret, token = self._given.values()
        if key:
            return {"access_key_id": key, "secret_access_key": secret, "token": token or None, "expires_at": None}
        import botocore.session

        found = botocore.session.Session().get_credentials()
        if found is None:
            raise no_credentials(self._url)
        frozen = found.get_frozen_credentials()
        again = dt.datetime.now(dt.timezone.utc) + dt.timedelta(seconds=self.REFRESH_S)
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            # botocore has no public name for it, and obstore takes no other zone
            "expires_at": min(again, getattr(found, "_expiry_time", again)).astimezone(dt.timezone.utc),
        }


def _made(client: Any, bucket: str, settings: dict[str, Any]) -> Any:
    from obstore.exceptions import UnknownConfigurationKeyError

    try:
        return client(bucket, **settings)
    except UnknownConfigurationKeyError:
        settings["config"].pop(_OF_S3, None)
        return client(bucket, **settings)


def _warn_of_fork() -> None:
    """Say once what a fork of this process cannot do: obstore waits there for threads that do not exist."""
    global _has_warned  # noqa: PLW0603 -- one per process
    if _has_warned or _first_pid != os.getpid():
        return
    _has_warned = True
    _log.warning(
        "this process was forked after obstore had been used in it: if the child uses obstore itself, e.g. in a DataLoader's "
        'worker, it hangs; use multiprocessing_context="forkserver", or the storage option backend="s3fs"'
    )


def _ranges(store: Any, key: str, starts: list[int], lengths: list[int], obs: Any) -> list[Any]:
    if len(starts) == 1:
        return [obs.get_range(store, check_key(key), start=starts[0], length=lengths[0])]
    return list(obs.get_ranges(store, check_key(key), starts=starts, lengths=lengths))


def _chain(first: memoryview, rest: Iterator[memoryview]) -> Iterator[memoryview]:
    yield first
    yield from rest
