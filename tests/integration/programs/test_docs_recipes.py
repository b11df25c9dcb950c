"""Every recipe of the pages is run here or in the test that is named here, or its page says that it was not run.

A recipe is a fenced block of Python, bash or YAML, known by its page and first line; a new one without an entry fails
the first test. Command lines: test_docs_commands.py.
"""

from __future__ import annotations

import pathlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.paths import ROOT
from support.ranks import wait_for

from flashckpt.shm.job_directory import jobs_in_memory

PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
HERE = "test_docs_recipes.py::test_python_block_runs"
BLOCKS = {
    ("data.md", "from torch.utils.data import DataLoader"): HERE,
    ("data.md", "from flashckpt.sampler import Order, Permutation"): HERE,
    ("data.md", "ElasticSampler(data, global_batch_size=64, ramp_up"): HERE,
    ("data.md", "from flashckpt.sampler import ElasticBatchSampler"): HERE,
    ("data.md", "from flashckpt.sampler import Mixture"): HERE,
    ("data.md", "samples = SeededSamples(dataset, seed=1)"): HERE,
    ("data.md", "ckpt.restore(step=1200)"): HERE,
    ("engine.md", "from flashckpt import Checkpointer"): HERE,
    ("engine.md", "report = ckpt.restore() or ckpt.restore(root="): HERE,
    (
        "engine.md",
        'mesh = init_device_mesh("cuda", (2, 4)',
    ): "not run: The two snippets with a mesh were not run as they stand",
    ("engine.md", "ckpt.track(model=stage_modules"): "not run: The two snippets with a mesh were not run as they stand",
    ("engine.md", "frozen = [name for name"): HERE,
    ("interop.md", "import torch.distributed.checkpoint as dcp"): HERE,
    ("interop.md", "names = {id(param): name"): HERE,
    ("recipes.md", "from flashckpt.integrations.transformers"): "test_recipes.py::test_recipe_killed_in_an_epoch",
    ("recipes.md", "from flashckpt.integrations.lightning"): "test_recipes.py::test_recipe_killed_in_an_epoch",
    ("recipes.md", "from flashckpt.integrations.accelerate"): "all_integrations.py::test_accelerates_page_runs",
    (
        "recipes.md",
        "from flashckpt.integrations.ray",
    ): "all_ray.py::test_ray_restarts_workers_from_memory_and_continues_on_one_and_four",
    (
        "recipes.md",
        "from flashckpt.integrations.deepspeed",
    ): "all_deepspeed.py::test_page_of_deepspeed_runs_and_what_no_snapshot_would_hold_is_refused",
    ("recipes.md", "from torchtitan.models.llama3"): "all_torchtitan.py::test_what_the_manager_cannot_do_is_refused",
    ("launching.md", "#!/bin/bash\n#SBATCH --nodes=4"): "slurm.py::test_job_of_several_nodes",
    ("launching.md", "#!/bin/bash\n#SBATCH --nodes=1"): "slurm.py::test_job_of_one_node_without_srun",
    ("format.md", "import struct"): "test_block.py::test_the_recipe_of_the_docs_prints_the_slots",
    ("README.md", "import torch"): "test_examples.py::test_loop_of_the_readme_killed_and_started_again",
}
"""Where a block is run: FILE::TEST, or "not run: " and words that its page must say."""


def blocks() -> list[tuple[str, str, str]]:
    """Return (page, language, text) of all fenced blocks."""
    return [
        (page.name, found[1], found[2])
        for page in PAGES
        for found in re.finditer(r"^```(\w+)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    ]


def entry(page: str, text: str) -> str | None:
    return next((where for (name, first), where in BLOCKS.items() if name == page and text.startswith(first)), None)


def test_every_block_has_a_test_or_its_page_says_that_it_has_none() -> None:
    recipes = [(page, text) for page, language, text in blocks() if language in {"python", "bash", "sh", "yaml"}]
    unknown = [(page, text.splitlines()[0]) for page, text in recipes if entry(page, text) is None]
    assert unknown == []
    stale = [key for key in BLOCKS if not any(page == key[0] and text.startswith(key[1]) for page, text in recipes)]
    assert stale == []


@pytest.mark.parametrize(("key", "where"), BLOCKS.items(), ids=lambda value: str(value)[:40])
def test_what_a_block_refers_to_is_there(key: tuple[str, str], where: str) -> None:
    if where.startswith("not run: "):
        (page,) = [path for path in PAGES if path.name == key[0]]
        assert where.removeprefix("not run: ") in page.read_text()
        return
    file, _, test = where.partition("::")
    assert re.search(rf"^def {test}", next((ROOT / "tests").rglob(file)).read_text(), re.MULTILINE)


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
