"""From a root to its one absolute form, the id under which its job finds memory again, and the store that serves it."""

from __future__ import annotations

import difflib
import functools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote

from flashckpt import entry_points
from flashckpt.core.records import digest
from flashckpt.environment import env
from flashckpt.errors import ConfigError, FlashckptError
from flashckpt.storage.store import Store, StoreType

MAX_PATH_BYTES = 3800
"""Linux allows 4096 bytes for a path; the rest is for the names below a root."""
MAX_NAME_BYTES = 255
MAX_URL_BYTES = 900
"""Object stores allow keys of 1024 bytes; the rest is for the names below a root."""
UNSUITED = ("http", "https", "git", "zip", "ftp")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_LOST_SLASH = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029]")
_EXPECTED = "a directory, file:///path, s3://bucket/path, gs://bucket/path or az://container/path"


@functools.lru_cache
def scheme_of(root: str) -> str:
    """Return the protocol of a root in lower case; "file" for a path and for local://."""
    match = _SCHEME.match(root)
    protocol = match.group(1).lower() if match else "file"
    return "file" if protocol == "local" else protocol


def root_url(root: str | os.PathLike[str]) -> str:
    """Return the absolute form of a root: file:// and a real path, or a URL without trailing slashes.

    Idempotent. In paths "%", "?" and "#" are written as in a URL.

    Raises:
        ConfigError: It cannot be a root; the error says why. Storage is not accessed.
    """
    text = _text_of(root)
    protocol = scheme_of(text)
    if "::" in text or protocol in UNSUITED:
        raise _refused(text, "cannot hold checkpoints", f"protocol {'chain' if '::' in text else protocol}")
    if protocol == "file":
        path = _real_path(text)
        return "file://" + path.replace("%", "%25").replace("?", "%3F").replace("#", "%23")
    bucket = text.partition("://")[2].partition("/")[0]
    if not bucket:
        raise _refused(text, "names no bucket", "nothing between '://' and the next '/'", remedy="is a variable unset?")
    if lost := set(text) & {"?", "#"}:
        raise _refused(
            text, "has a character that URLs end at", ", ".join(sorted(lost)), remedy="leave it out of the name"
        )
    if len(text.encode()) > MAX_URL_BYTES:
        raise _refused(text, "is too long", f"{len(text.encode())} bytes", expected=f"at most {MAX_URL_BYTES} bytes")
    return text.rstrip("/")


def local_path(url: str) -> str:
    """Return the path of a root that `root_url` gave with file://."""
    return unquote(url.removeprefix("file://"))


def _text_of(root: object) -> str:
    if isinstance(root, os.PathLike):
        root = os.fspath(root)
    if not isinstance(root, str):
        raise ConfigError("root is neither a path nor a URL", found=repr(root)[:200], expected=_EXPECTED)
    if bad := _CONTROL.search(root):
        raise _refused(root, "has a character that is not valid text", f"{bad.group()!a} at position {bad.start()}")
    if not root.strip():
        raise _refused(
            root, "is empty", repr(root), remedy="name a directory ('.' is the current one); is a variable unset?"
        )
    if _LOST_SLASH.match(root):
        raise _refused(
            root,
            "has one slash after its protocol",
            root[:200],
            remedy="pathlib.Path drops a slash of a URL: pass a str;  a directory of that name is './"
            + root[:80]
            + "'",
        )
    return root


def _real_path(text: str) -> str:
    path = text
    if match := _SCHEME.match(text):
        quoted = text[match.end() :].removeprefix("localhost")
        path = unquote(quoted)
        if not path.startswith("/"):
            raise _refused(text, "names no absolute path", text[:200], expected="file:///path, with three slashes")
        if path != quoted:
            _ = _text_of(path)
    path = os.path.expanduser(path)  # noqa: PTH111 -- pathlib raises where the user is unknown
    if path.startswith("~"):
        raise _refused(
            text, "names an unknown user", path.partition("/")[0], remedy=f"a directory of that name is './{path[:80]}'"
        )
    path = os.path.realpath(path)
    encoded = os.fsencode(path)
    if (longest := max(map(len, encoded.split(b"/")))) > MAX_NAME_BYTES:
        raise _refused(text, "has a name that is too long", f"{longest} bytes", expected="at most 255 bytes per name")
    if len(encoded) > MAX_PATH_BYTES:
        raise _refused(text, "is too long", f"{len(encoded)} bytes", expected=f"at most {MAX_PATH_BYTES} bytes")
    return path


def _refused(root: str, problem: str, found: str, *, expected: str = _EXPECTED, remedy: str = "") -> ConfigError:
    shown = ascii(root) if len(root) <= 200 else ascii(root[:200]) + "..."
    return ConfigError(f"the root {shown} {problem}", found=found, expected=expected, remedy=remedy)


# -- The id of a job, made of its root unless somebody names it -----------------------------------------------------

_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def root_digest(root: str) -> int:
    """Return the u64 in every superblock that ties a segment to its root."""
    return digest(root_url(root).encode())


def job_id(root: str | os.PathLike[str], explicit: str | None = None) -> str:
    """Return the job id: `explicit`, FLASHCKPT_JOB_ID, Slurm's or the JobSet's id with a digest of root and uid, or that alone.

    Runs with different roots in one allocation of a scheduler are different jobs; a requeue changes neither part. A random run id, such as torchrun makes per launch, does not identify a job and is ignored.

    Raises:
        ConfigError: The id cannot name a directory.
    """
    if explicit is not None:
        return _checked(explicit, "job=")
    if env.FLASHCKPT_JOB_ID:
        return env.FLASHCKPT_JOB_ID
    # a scheduler's are the same over a requeue
    for name, prefix in {"SLURM_JOB_ID": "slurm", "JOBSET_UID": "jobset", "JOB_UID": "job"}.items():
        if value := getattr(env, name):
            return _checked(f"{prefix}-{value}-{_of_root(root)}", name)
    return job_id_of_root(root)


def job_id_of_root(root: str | os.PathLike[str]) -> str:
    """Return the id of a job that nothing but its root and user identify."""
    return f"root-{_of_root(root)}"


def _of_root(root: str | os.PathLike[str]) -> str:
    return f"{digest(f'{root_url(root)}|{os.getuid()}'.encode()):016x}"


def _checked(value: object, where: str) -> str:
    if not isinstance(value, str) or not _SAFE.fullmatch(value):
        raise ConfigError(
            f"the job id of {where} cannot name a directory",
            found=ascii(value)[:200],
            expected="letters, digits, '.', '_' and '-', at most 128, starting with a letter or digit",
        )
    return value


# -- The stores: of the core, and those outside it, found by entry points ------------------------------------------

_MEMORY_ONLY = ("memory",)
_S3 = ("s3", "s3a")
_COMMON = ("file", "gs", "gcs", "az", "abfs", "memory")
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
    if protocol in _S3:
        options["backend"] = backend
    kind: StoreType = _plugged(protocol) or entry_points.load(entry_points.EXTRAS, "fsspec-store")
    return kind(text, options)


def open_in_rank(url: str, options: Mapping[str, object]) -> Store:
    """Open a root as `open_store` does, but s3:// through s3fs unless the options name a client.

    A program that trains forks the workers of its loaders, and obstore's runtime, if it was used before, hangs in them.
    """
    others = dict(options)
    backend = others.pop("backend", "auto")
    return open_store(url, backend="s3fs" if backend == "auto" else str(backend), **others)


def place_of(url: str, options: Mapping[str, object]) -> str:
    """Return endpoint and region of an s3:// root for a message; "" for another root, or where that is unknown."""
    if scheme_of(url) not in _S3:
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
    if (kind := _plugged(protocol)) is None:
        if protocol not in _COMMON:
            _refuse_unknown_protocol(url, protocol)
        return
    if (check_url := getattr(kind, "check_url", None)) is not None:
        check_url(url)
    if unknown := sorted(set(options) - kind.OPTIONS):
        near = [name for one in unknown for name in difflib.get_close_matches(one, kind.OPTIONS, 1)]
        raise ConfigError(
            f"the root {url} has no such storage option",
            found=", ".join(unknown),
            expected=", ".join(near or sorted(kind.OPTIONS)),
            remedy="storage options have the names that the client of the protocol gives them",
        )
    if (check_values := getattr(kind, "check_values", None)) is not None:
        check_values(url, options)


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
