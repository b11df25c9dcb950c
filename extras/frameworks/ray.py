"""Ray Train: a Checkpointer whose workers find the memory of their node again when Ray restarts them.

    ckpt = checkpointer("run7", snapshot_every=5, persist_every=100)  # in the function that TorchTrainer runs

Needs ray 2.60 with its Train V2. Everything else is as in a loop of one's own: track(), restore(), step().
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ray.train import get_context

from flashckpt import Checkpointer
from flashckpt.environment import env
from flashckpt.errors import ConfigError
from flashckpt.storage.factory import job_id_of_root, scheme_of


def checkpointer(root: str | os.PathLike[str], **options: Any) -> Checkpointer:
    """Return the Checkpointer of this worker; to be called in the function that TorchTrainer runs.

    Args:
        root: As for `Checkpointer`. A relative folder lies in `RunConfig.storage_path`: Ray gives every run another
            working directory.
        **options: As for `Checkpointer`. Without `job=` or FLASHCKPT_JOB_ID the root identifies the job: the ids of
            Slurm and Kubernetes belong to the Ray cluster, which may run several jobs.

    Raises:
        ConfigError: This is no worker of Ray Train, or `root` is relative and the run's storage is no folder.
    """
    try:
        storage = get_context().get_storage()
    except RuntimeError as error:
        raise ConfigError(
            "this process is not a worker of Ray Train",
            found=str(error),
            expected="a call inside the function that TorchTrainer runs",
            remedy="call checkpointer() at the beginning of that function; elsewhere use flashckpt.Checkpointer",
        ) from error
    text = os.fspath(root)
    if scheme_of(text) == "file" and "://" not in text and not Path(text).is_absolute():
        text = str(_folder_of(storage, text) / text)
    if options.get("job") is None and not env.FLASHCKPT_JOB_ID:
        options["job"] = job_id_of_root(text)
    return Checkpointer(text, **options)


def _folder_of(storage: Any, root: str) -> Path:
    if (kind := storage.storage_filesystem.type_name) != "local":
        raise ConfigError(
            "a relative root needs a run whose storage is a folder",
            found=f"root {root!r}, storage_path on {kind}",
            expected="a URL, such as s3://bucket/run7, or an absolute path",
        )
    return Path(storage.storage_fs_path)


__all__ = ["checkpointer"]
