"""The root of a job in its one absolute form, and the id under which the job finds its memory again after a restart."""

from __future__ import annotations

import functools
import os
import re
from urllib.parse import unquote

from flashckpt.core.digest import digest
from flashckpt.environment import env
from flashckpt.errors import ConfigError

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
        path = unquote(text[match.end() :].removeprefix("localhost"))
        if not path.startswith("/"):
            raise _refused(text, "names no absolute path", text[:200], expected="file:///path, with three slashes")
        _ = _text_of(path)
    path = os.path.expanduser(path)  # noqa: PTH111 -- pathlib raises where the user is unknown
    if path.startswith("~"):
        raise _refused(
            text, "names an unknown user", path.partition("/")[0], remedy=f"a directory of that name is './{path[:80]}'"
        )
    path = os.path.realpath(path)
    sizes = [len(os.fsencode(name)) for name in path.split("/")]
    if max(sizes) > MAX_NAME_BYTES:
        raise _refused(
            text, "has a name that is too long", f"{max(sizes)} bytes", expected="at most 255 bytes per name"
        )
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise _refused(
            text, "is too long", f"{len(os.fsencode(path))} bytes", expected=f"at most {MAX_PATH_BYTES} bytes"
        )
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


def earlier_job_id(job: str, root: str) -> str | None:
    """Return the id that an earlier release gave a scheduler's job, which did not contain the root; None where it was the same."""
    head, _, of_root = job.rpartition("-")
    return head if head not in ("", "root") and of_root == _of_root(root) else None


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
