"""flashckpt.integrations.torchtitan in torchtitan's own program: killed, in other layouts, from its own checkpoints.

The debug model on CPUs, with what torchtitan asks of GPUs replaced (`torchtitan_cpu`); part of `make test-frameworks`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from support.dlrun import run_dlrun
from support.paths import ROOT

from flashckpt.checkpoint.catalog import list_checkpoints
from flashckpt.storage.factory import open_store

NEEDED = ("torchtitan", "tokenizers", "datasets", "tyro", "spmd_types")
NEXT = importlib.util.find_spec("torchtitan") and importlib.util.find_spec("torchtitan.components.data")
pytestmark = [
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in NEEDED), reason="needs torchtitan (make test-frameworks)"
    ),
    pytest.mark.timeout(900),
]
JOB = ROOT / "tests/integration/frameworks/torchtitan_job.py"
STEPS = 12
TENSOR, PIPELINE = ("--parallelism.tensor-parallel-degree", 2), ("--parallelism.pipeline-parallel-degree", 2)
OFFLINE = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
FOUND = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tokenizer and texts: files of the standard library."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("titan")
    (folder / "assets/texts").mkdir(parents=True)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py"))
    texts = [file.read_text()[:3000] for file in files]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<bos>", "<eos>"]
    trainer = trainers.BpeTrainer(vocab_size=1000, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "assets/tokenizer.json"))
    names = json.dumps({"bos_token": special[0], "eos_token": special[1]})
    (folder / "assets/tokenizer_config.json").write_text(names)
    (folder / "assets/texts/data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


def run(folder: Path, world: int, *words: object, code: int = 0) -> str:
    """Run the program under dlrun to its end; return what it printed."""
    folder.mkdir(exist_ok=True)
    for file in folder.glob("rank*.txt"):
        file.unlink()
    env = {**FOUND, **OFFLINE, "HF_HOME": str(folder.parent / "hf")}
    found, output = run_dlrun(
        folder, "--nproc-per-node", world, JOB, folder, *words, deadline_s=300, fresh=True, env=env
    )
    assert found == code, output
    return output


def lines(folder: Path, rank: int = 0) -> dict[int, str]:
    """Return what a rank said of each step, the last time it trained it: loss, norm, tokens, a random number."""
    said = (folder / f"rank{rank}.txt").read_text().splitlines()
    return {int(line.split()[0]): line.split(maxsplit=1)[1] for line in said}


def loss(line: str) -> float:
    return float.fromhex(line.split(maxsplit=1)[0])


def digests(folder: Path, name: str, world: int) -> dict[str, str]:
    """Return the digest of every parameter and moment, of all pipeline stages."""
    found: dict[str, str] = {}
    for rank in range(world):
        found |= json.loads((folder / f"{name}{rank}.json").read_text())
    return found


def steps_on_storage(folder: Path) -> list[int]:
    return sorted(info.step for info in list_checkpoints(open_store(folder / "flashckpt")))


def test_sharded_run_that_is_killed_goes_on_from_memory_and_on_one_rank_as_asked(folder: Path) -> None:
    """FSDP 2, a worker for the loader, and a validation at the very step that is restored."""
    whole, killed = folder / "fsdp-whole", folder / "fsdp-killed"
    run(whole, 2, "--steps", 9, "--validate")
    output = run(killed, 2, "--steps", 9, "--validate", "--kill-at", 8)
    assert "restored step 6 " in output, output
    assert " from memory in " in output, output
    for rank in range(2):
        assert sorted(lines(whole, rank)) == list(range(1, 10))
        assert lines(killed, rank) == lines(whole, rank)
    assert digests(killed, "ended", 2) == digests(whole, "ended", 2)
    assert steps_on_storage(whole) == [4, 8, 9]
    if not NEXT:  # Grain's loaders there have no workers
        output = run(whole, 2, code=19)  # without the one that --validate gives
        assert "'data', a HuggingFaceTextDataLoader, has no position with another number of workers" in output, output
    sharded = digests(whole, "ended", 2)
    output = run(whole, 1, code=19)
    assert "torchtitan's loader has no position on another number of data-parallel ranks" in output, output
    assert "step 9 of a run on 2" in output, output
    output = run(whole, 1, "--steps", 11, "--checkpoint.data-on-other-ranks", "restart")
    assert "step 9 was trained on 2 data-parallel ranks, now 1: the data begins again" in output, output
    assert digests(whole, "loaded", 1) == sharded
    assert sorted(lines(whole)) == [10, 11]


@pytest.mark.skipif(
    bool(NEXT),
    reason="torchtitan's source after 0.3 cuts no plain attention by tensor parallelism, and CPUs have no other",
)
def test_run_continues_in_other_layouts_with_the_losses_of_one_rank(folder: Path) -> None:
    """One rank, from its step 4 in TP 2, killed in a second attempt, and from there in PP 2, killed too."""
    home = folder / "layouts"
    run(home, 1)
    alone = lines(home)
    assert sorted(alone) == list(range(1, STEPS + 1))
    run(home, 2, *TENSOR, "--steps", 8, "--checkpoint.load-step", 4)
    tensor = [lines(home, rank) for rank in range(2)]
    output = run(home, 2, *TENSOR, "--steps", 8, "--checkpoint.load-step", 4, "--kill-at", 7)
    assert "restored step 6 " in output, output  # not step 4 once more
    assert [lines(home, rank) for rank in range(2)] == tensor
    parallel = digests(home, "ended", 2)
    output = run(home, 2, *PIPELINE, "--kill-at", 11)
    assert "restored step 10 " in output, output
    assert digests(home, "loaded", 2) == parallel
    pipeline = lines(home, 1)  # of the last stage
    assert sorted(tensor[0]) == list(range(5, 9))
    assert sorted(pipeline) == list(range(9, STEPS + 1))
    for step, line in {**tensor[0], **pipeline}.items():
        assert loss(line) == pytest.approx(loss(alone[step]), rel=1e-4)


def test_torchtitans_own_checkpoint_and_weights_for_hugging_face_are_continued_from(folder: Path) -> None:
    own, unbroken = folder / "own", folder / "unbroken"
    run(unbroken, 1, "--steps", 6, "--registry", "plain")
    run(own, 1, "--steps", 4, "--registry", "plain")
    output = run(own, 1, "--steps", 6, "--checkpoint.last-save-in-hf")
    assert "Loading the checkpoint from" in output, output
    assert [line.rsplit(maxsplit=1)[0] for line in lines(own).values()] == [
        line.rsplit(maxsplit=1)[0] for step, line in lines(unbroken).items() if step > 4
    ]  # but for the random numbers, which torchtitan does not keep
    assert digests(own, "ended", 1) == digests(unbroken, "ended", 1)
    assert steps_on_storage(own) == [6]
    weights = own / "checkpoint/step-6"
    start = folder / "start"
    run(start, 1, "--steps", 1, "--checkpoint.initial-load-in-hf", "--checkpoint.initial-load-path", weights)
    loaded = digests(start, "loaded", 1)
    assert loaded == {name: digest for name, digest in digests(own, "ended", 1).items() if name in loaded}
    assert sorted(lines(start)) == [1]
    shutil.rmtree(start)


def test_what_the_manager_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "integration.frameworks.torchtitan_refusals", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, **FOUND, **OFFLINE},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "all as expected"
