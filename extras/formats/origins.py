"""Which framework a checkpoint is from, by the names of its files and members; what step its names give. Torch-free."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path

from flashckpt.interop.foreign_files import decoding

ORIGINS = ("trainer", "peft", "accelerate", "lightning", "deepspeed", "megatron")
"""Hugging Face's Trainer, PEFT and Accelerate, Lightning, DeepSpeed (universal), Megatron (torch_dist)."""
_MEMBERS = re.compile(rb"pytorch-lightning_version")
_HEAD_BYTES = 64 << 20


def origin_of(folder: Path) -> str | None:
    """Return the framework that wrote a folder: one of ORIGINS; None where it is none of them."""
    return _of_hugging_face(folder) or _of_ranks(folder)


def _of_hugging_face(folder: Path) -> str | None:
    if (folder / "trainer_state.json").is_file():
        return "trainer"
    if (folder / "optimizer.bin").is_file() or any(folder.glob("random_states_*.pkl")):
        return "accelerate"
    if (folder / "adapter_config.json").is_file():
        return "peft"
    if (folder / "optimizer.pt").is_file() and any(folder.glob("*.safetensors")):
        return "trainer"
    return None


def _of_ranks(folder: Path) -> str | None:
    if (folder / ".metadata").is_file() and (folder / "common.pt").is_file():
        return "megatron"
    if folder_of_newest(folder, "deepspeed") is not None or _has_zero_files(folder):
        return "deepspeed"
    if folder_of_newest(folder, "megatron") is not None:
        return "megatron"
    return None


def folder_of_newest(folder: Path, kind: str) -> Path | None:
    """Return the folder of the checkpoint itself: `folder`, or the one that its tracker file names; None if there is none."""
    if kind == "deepspeed":
        names, marker = ("latest_universal",), "zero"
    else:
        names, marker = ("latest_checkpointed_iteration.txt",), "common.pt"
    if (folder / marker).exists():
        return folder
    for name in names:
        if (tracker := folder / name).is_file():
            with decoding(tracker, "the name of the newest checkpoint"):
                text = tracker.read_text()[:200].strip()
            inside = folder / (
                f"iter_{int(text):07d}" if kind == "megatron" and text.isdecimal() and text.isascii() else text
            )
            if inside.parent == folder and (inside / marker).exists():
                return inside
    return None


def is_lightning(path: Path) -> bool:
    """Return whether a file of torch.save is a checkpoint of Lightning: it records the version that wrote it."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        entry = next((one for one in archive.infolist() if one.filename.endswith("/data.pkl")), None)
        if entry is None or entry.file_size > _HEAD_BYTES:
            return False
        return _MEMBERS.search(archive.read(entry)) is not None


def step_in_name(folder: Path) -> int | None:
    """Return the step that a folder is named after: checkpoint-120, global_step120, iter_0000120; else None."""
    found = re.match(r"(?:checkpoint-|global_step|iter_)(\d{1,18})(?:_universal)?$", folder.absolute().name)
    return int(found[1]) if found else None


def step_of_trainer(folder: Path) -> int | None:
    """Return `global_step` of a Trainer's folder; of another one, that of its name."""
    path = folder / "trainer_state.json"
    if not path.is_file():
        return step_in_name(folder)
    with decoding(path, "the state of a Trainer", nbytes=path.stat().st_size):
        step = json.loads(path.read_bytes())["global_step"]
        if type(step) is not int or step < 0:
            raise ValueError(f"global_step is {step!r:.40}")
    return step


def _has_zero_files(folder: Path) -> bool:
    """Return whether this is a folder of DeepSpeed that is not universal: its reader says how to make it so."""
    places = [
        folder,
        *([folder / (folder / "latest").read_text()[:200].strip()] if (folder / "latest").is_file() else []),
    ]
    return any(place.is_dir() and any(place.glob("*zero_pp_rank_*_optim_states.pt")) for place in places)
