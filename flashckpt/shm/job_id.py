"""The id under which a job finds its own memory again after a restart."""

from __future__ import annotations

import os
import re

from flashckpt.core.digest import digest
from flashckpt.environment import env
from flashckpt.errors import ConfigError
from flashckpt.shm.roots import root_url

__all__ = ["earlier_job_id", "job_id", "job_id_of_root", "root_digest", "root_url"]

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
    return head if of_root == _of_root(root) and head != "root" else None


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
