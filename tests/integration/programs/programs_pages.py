"""The Python blocks of the pages run as they stand, in one process."""

from __future__ import annotations

import pathlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pages import HERE, blocks, entry
from support.ranks import wait_for

from flashckpt.shm.job_directory import jobs_in_memory


def world(tmp_path: Path) -> dict[str, Any]:
    """Return what the snippets take for granted: a model, its optimizer, data, a loop of a few steps."""
    from torch.utils.data import DataLoader, TensorDataset

    from flashckpt import Checkpointer
    from flashckpt.sampler import ElasticSampler, SeededSamples

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    data: Any = TensorDataset(torch.randn(4096, 4))
    data.block_size = 64
    sampler = ElasticSampler(data, dp_rank=0, dp_size=1, global_batch_size=512, seed=0)
    sampler.next_ids()  # the batches of the snippets are not its own
    return {
        "torch": torch, "Checkpointer": Checkpointer, "ElasticSampler": ElasticSampler, "model": model,
        "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer), "dataset": data,
        "data": data, "code": data, "prose": data, "dp_rank": 0, "dp_size": 1, "epochs": 1, "steps": 3, "step": 1,
        "sampler": sampler,
        "DataLoader": DataLoader, "SeededSamples": SeededSamples, "loss": 0.0, "log": lambda *_: None,
        "evaluate": lambda: None, "batch": lambda: torch.randn(2, 4), "array": torch.arange(8).numpy(),
        "pathlib": pathlib,
    }  # fmt: skip


def as_one_process(text: str, folder: Path) -> str:
    """Fill in what a snippet leaves out: its root is a folder, a call's `...` the settings of one rank, a loop's a step."""
    text = text.replace("s3://bucket", str(folder)).replace(", ...)", ", dp_rank=0, dp_size=1, seed=0)")
    text = text.replace("num_workers=4, persistent_workers=True", "num_workers=0").replace(
        "num_workers=4", "num_workers=0"
    )
    text = text.replace("        step += 1\n", "")  # `...` counts
    text = re.sub(r"^( +)\.\.\.$", r"\1if 'count' in globals(): step = count = count + 1", text, flags=re.MULTILINE)
    return text.replace("global_batch_size=512", "global_batch_size=32")  # a batch of the loader each


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # dcp in one process
@pytest.mark.parametrize(
    ("page", "text"),
    [(page, text) for page, _, text in blocks() if entry(page, text) == HERE],
    ids=lambda value: str(value)[:50].replace("\n", " "),
)
def test_python_block_runs(
    page: str, text: str, tmp_path: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it stands, but for what one process without a bucket cannot have (as_one_process)."""
    from flashckpt import Checkpointer

    monkeypatch.chdir(tmp_path)
    names = world(tmp_path)
    opened: list[Checkpointer] = []
    if "from flashckpt import Checkpointer" not in text and "ckpt" in text:
        names["ckpt"] = prepared(tmp_path, names, text)
        opened.append(names["ckpt"])
    names["count"] = 0
    exec(compile(as_one_process(text, tmp_path), page, "exec"), names)
    if isinstance(ckpt := names.get("ckpt"), Checkpointer) and ckpt not in opened:
        assert ckpt is not None
        opened.append(ckpt)
    for one in opened:
        one.close()


def prepared(tmp_path: Path, names: dict[str, Any], text: str) -> Any:
    """Return a Checkpointer on a root that holds the steps a snippet asks for."""
    from flashckpt import Checkpointer

    wanted = [int(number) for number in re.findall(r"step=(\d+)", text)] or [1]
    for folder in ("own", "pretrained", "run"):
        with Checkpointer(tmp_path / folder, job=folder, snapshot_every=1, persist_every=1) as first:
            first.track(model=names["model"], optimizer=names["optimizer"], sampler=names["sampler"])
            first.restore()
            for step in wanted:
                names["sampler"].commit(512)
                names["optimizer"].step()
                first.step(step)
            first.wait(60)
    wait_for(
        lambda: not any(job.daemon_alive() for job in jobs_in_memory()[0]), what="the daemons of the runs before to end"
    )
    ckpt = Checkpointer(tmp_path / "own", job="own")
    ckpt.track(model=names["model"], optimizer=names["optimizer"], sampler=names["sampler"])
    return ckpt
