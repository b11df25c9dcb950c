"""The fenced blocks of the pages, and for each the test that runs it."""

from __future__ import annotations

import re

from support.paths import ROOT

PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
HERE = "programs_pages.py::test_python_block_runs"
BLOCKS = {
    ("data.md", "from torch.utils.data import DataLoader"): HERE,
    ("data.md", "from flashckpt.sampler import Order, Permutation"): HERE,
    ("data.md", "ElasticSampler(data, global_batch_size=64, ramp_up"): HERE,
    ("data.md", "from flashckpt.sampler import ElasticBatchSampler"): HERE,
    ("data.md", "from flashckpt.sampler import Mixture"): HERE,
    ("data.md", "samples = SeededSamples(dataset, seed=1)"): HERE,
    ("data.md", "ckpt.restore(step=1200)"): HERE,
    (
        "data.md",
        "from flashckpt.integrations.loaders import ExactLoader",
    ): "test_exact_loader.py::test_every_place_is_continued_from",
    (
        "data.md",
        "loader = DataLoader(ckpt.keep_samples(dataset)",
    ): "test_kept_samples.py::test_killed_and_started_with_kept_samples_the_run_is_the_unbroken_one",
    ("engine.md", "from flashckpt import Checkpointer"): HERE,
    (
        "launching.md",
        "from torchx import specs",
    ): "all_torchx.py::test_the_component_of_the_page_starts_dlrun",
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
    ("README.md", "import torch"): "programs_examples.py::test_loop_of_the_readme_killed_and_started_again",
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
