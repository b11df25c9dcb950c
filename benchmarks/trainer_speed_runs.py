"""Who runs in benchmarks/trainer_speed.py, with which settings: the same model, batch and layout for each."""

from __future__ import annotations

import json
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flashckpt.trainer.prepare.vocabulary import byte_tokenizer

HERE = Path(__file__).parent
ROWS, SEQ_LEN = 4, 256
SIZES = {"dim": 256, "layers": 6, "heads": 16, "vocab": 2048}
FFN = 768  # what torchtitan's debugmodel has: 6,163,712 parameters
TEXT_BYTES, DOCUMENT_CHARACTERS = 4_000_000, 2000
FOREVER = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """A layout; `text` for people."""

    text: str
    dp: int = 1
    tp: int = 1
    pp: int = 1

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self.dp * self.tp * self.pp


LAYOUTS = {
    "1": Degrees(text="one process"),
    "fsdp2": Degrees(text="FSDP 2", dp=2),
    "tp2": Degrees(text="TP 2, sequence parallel", tp=2),
    "pp2": Degrees(text="PP 2, 1F1B, micro-batches of one row", pp=2),
    "2x2": Degrees(text="FSDP 2 x TP 2, sequence parallel", dp=2, tp=2),
    "pp2tp2": Degrees(text="PP 2 x TP 2, sequence parallel, 1F1B, micro-batches of one row", pp=2, tp=2),
}


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One program in one layout.

    Attributes:
        command: Of each rank.
        tokens: That a step of all ranks trains.
        shm: Where its snapshots are: CPU of the daemon that serves this folder counts too.
    """

    name: str
    ranks: int
    tokens: int
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    shm: str = ""


def write_data(folder: Path) -> None:
    """Write the Python library's sources as the contestants want them: tokens are bytes, a row is one document."""
    folder.mkdir(parents=True, exist_ok=True)
    library = Path(sysconfig.get_paths()["stdlib"])
    text = ""
    for path in sorted(library.glob("*.py")):
        text += path.read_text(errors="ignore")
        if len(text) > TEXT_BYTES:
            break
    np.frombuffer(text.encode(), dtype=np.uint8).astype("<u2").tofile(folder / "train.bin")
    (folder / "json").mkdir(exist_ok=True)
    pieces = [text[i : i + DOCUMENT_CHARACTERS] for i in range(0, len(text), DOCUMENT_CHARACTERS)]
    (folder / "json" / "data.jsonl").write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces))
    (folder / "tokenizer").mkdir(exist_ok=True)
    for name, content in byte_tokenizer().items():
        (folder / "tokenizer" / name).write_bytes(content)


def contestants(
    layout: str, folder: Path, shm: Path, *, torchtitan: str | None, nanogpt: str | None
) -> list[Contestant]:
    """Return who runs in a layout."""
    degrees = LAYOUTS[layout]
    runs = [_ours(layout, degrees, folder), _ours(layout, degrees, folder, shm=shm / layout)]
    if torchtitan:
        runs.append(_torchtitan(layout, degrees, folder, torchtitan))
    if nanogpt and degrees.ranks == 1:
        runs += [
            _nanogpt(folder, nanogpt, "nanoGPT"),
            _nanogpt(folder, nanogpt, "nanoGPT as large", inner=FFN * 3 // 2),
        ]
    return runs


def _nanogpt(folder: Path, source: str, name: str, **more: int) -> Contestant:
    """Return nanoGPT as it is; with `inner`, two matrices of that width are as large as our three of FFN: equal multiplications."""
    sizes = json.dumps({**SIZES, "rows": ROWS, "seq_len": SEQ_LEN, **more})
    command = [sys.executable, str(HERE / "trainer_speed_nanogpt.py"), source, str(folder / "train.bin"), sizes]
    return Contestant(name=name, ranks=1, tokens=ROWS * SEQ_LEN, command=command)


def _ours(layout: str, degrees: Degrees, folder: Path, shm: Path | None = None) -> Contestant:
    name = "snapshots" if shm else "flashckpt"
    data = {"kind": "tokens", "urls": [str(folder / "train.bin")]}
    config: dict[str, Any] = {
        "model": {**SIZES, "kv_heads": SIZES["heads"], "ffn": FFN},
        "parallel": {"tp": degrees.tp, "pp": degrees.pp},
        "train": {
            "steps": FOREVER,
            "seq_len": SEQ_LEN,
            "global_batch": ROWS * degrees.dp,
            "micro_batch": 1 if degrees.pp > 1 else ROWS,
            "device": "cpu",
        },
        "optim": {"lr": 8e-4, "schedule": "constant"},
        "data": {"folder": str(folder / "ours"), "sources": [data]},
        "log": {"folder": str(folder / layout / name / "log")},
    }
    if shm:
        config["checkpoint"] = {"root": str(folder / layout / "root"), "snapshot_every": 5, "persist_every": 50}
    return Contestant(
        name=name,
        ranks=degrees.ranks,
        tokens=ROWS * SEQ_LEN * degrees.dp,
        command=[sys.executable, str(HERE / "trainer_speed_ours.py"), json.dumps(config)],
        environment={"FLASHCKPT_SHM_DIR": str(shm)} if shm else {},
        shm=str(shm or ""),
    )


def _torchtitan(layout: str, degrees: Degrees, folder: Path, python: str) -> Contestant:
    path = Path(python).absolute()
    command = [str(path / "bin" / "python" if path.is_dir() else path), str(HERE / "trainer_speed_titan.py")]
    options = {
        "--module": "llama3",
        "--config": "llama3_debugmodel",  # dim 256, 6 layers, 16 heads, 2,048 tokens, 768 in the feed-forward part
        "--hf-assets-path": str(folder / "tokenizer"),
        "--dataloader.dataset-path": str(folder / "json"),
        "--dump-folder": str(folder / layout / "torchtitan" / "out"),
        "--training.mixed-precision-param": "float32",
        "--training.local-batch-size": str(ROWS),
        "--training.seq-len": str(SEQ_LEN),
        "--training.steps": str(FOREVER),
        "--parallelism.tensor-parallel-degree": str(degrees.tp),
        "--parallelism.pipeline-parallel-degree": str(degrees.pp),
        "--parallelism.pipeline-parallel-schedule": "1F1B",
    }
    if degrees.ranks > 1:  # the default works with one rank only here
        options["--parallelism.spmd-backend"] = "partial_dtensor"
    command += [word for option in options.items() for word in option]
    command += ["--training.disable-cuda-graphs", "activation-checkpoint:none"]
    return Contestant(
        name="torchtitan",
        ranks=degrees.ranks,
        tokens=ROWS * SEQ_LEN * degrees.dp,
        command=command,
        environment={
            "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "WANDB_MODE": "disabled",
        },
    )  # fmt: skip
