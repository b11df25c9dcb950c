"""Jobs under dlrun on one GPU: ranks killed in a step, in a copy, in a restore; memory, contexts and drivers that fail."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.dlrun import run_dlrun, traces
from support.training import run_config, write_corpus

from flashckpt.trainer.config import to_toml
from integration.gpu.device import device_type, in_time
from integration.gpu.job import STEPS

__all__ = ["device_type", "in_time"]
pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).resolve().parents[3]
SNAPSHOT = 6  # the newest one when step 7 dies; 4 where its own copy is what dies


def run(
    folder: Path,
    kind: str,
    backend: str,
    world: int,
    *words: object,
    restarts: int = 3,
    env: dict[str, str] | None = None,
) -> tuple[int, str]:
    """Run the job to its end; return (exit code, output)."""
    folder.mkdir(exist_ok=True)
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    flags = ("--standalone", f"--nproc-per-node={world}", f"--max-restarts={restarts}", "-m", "integration.gpu.job")
    job = (folder, "--device", kind, "--backend", backend, "--job", folder.name)
    return run_dlrun(folder, *flags, *job, *words, env={"PYTHONPATH": path, **(env or {})}, deadline_s=200)


def backend_of(kind: str) -> str:
    return "nccl" if kind == "cuda" else "gloo"


def check_trace(folder: Path, unbroken: Path, world: int) -> None:
    """Every step of every generation has the loss of the unbroken run, bit for bit."""
    found, wanted = traces(folder, world), traces(unbroken, world)
    assert all(sorted(rank) == list(range(1, STEPS + 1)) for rank in wanted)
    assert found == wanted


def first_steps_trained(folder: Path, rank: int = 0) -> list[int]:
    """Return the first step of each generation that trained."""
    first: dict[str, int] = {}
    for line in (folder / f"trace{rank}").read_text().splitlines():
        generation, step, _ = line.split()
        first.setdefault(generation, int(step))
    return list(first.values())


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, int], Path]:
    """Runs that nothing happens to, each made once."""
    made: dict[tuple[str, str, int], Path] = {}

    def run_once(kind: str, backend: str, world: int) -> Path:
        if (key := (kind, backend, world)) not in made:
            folder = tmp_path_factory.mktemp("unbroken") / f"{backend}{world}"
            code, output = run(folder, kind, backend, world)
            assert code == 0, output
            made[key] = folder
        return made[key]

    return run_once


@pytest.mark.parametrize(("backend", "world"), [("nccl", 1), ("gloo", 3)])
@pytest.mark.parametrize(
    ("death", "goes_on"), [("step", SNAPSHOT + 1), ("copy", SNAPSHOT - 1), ("restore", SNAPSHOT + 1)]
)
def test_a_rank_killed_in_a_step_a_copy_or_a_restore_goes_on_to_the_same_trace(
    death: str,
    goes_on: int,
    backend: str,
    world: int,
    device_type: str,
    unbroken: Callable[[str, str, int], Path],
    tmp_path: Path,
) -> None:
    if backend == "nccl":
        backend = backend_of(device_type)
    whole = unbroken(device_type, backend, world)
    folder = tmp_path / death
    code, output = run(folder, device_type, backend, world, "--die", death, "--rank", world - 1)
    assert code == 0, output
    assert output.count(" failed first") == (2 if death == "restore" else 1), output
    assert first_steps_trained(folder) == [1, goes_on]
    check_trace(folder, whole, world)


@pytest.mark.parametrize(
    ("death", "says"),
    [
        ("memory", "out of memory"),
        ("assert", "device-side assert triggered"),
        ("ordinal", "invalid device ordinal"),
    ],
)
def test_a_rank_whose_device_fails_is_named_with_the_drivers_words_and_the_job_goes_on(
    death: str, says: str, device_type: str, tmp_path: Path
) -> None:
    code, output = run(tmp_path / death, device_type, backend_of(device_type), 1, "--die", death)
    assert code == 0, output
    assert says in output
    assert first_steps_trained(tmp_path / death) == [1, SNAPSHOT + 1]
    others = {"out of memory", "device-side assert triggered", "invalid device ordinal"} - {says}
    assert not [word for word in others if word in output]


@pytest.mark.parametrize("visible", ["", "63"])
def test_a_device_that_is_not_there_ends_the_trainer_before_it_starts(
    visible: str, device_type: str, tmp_path: Path
) -> None:
    """No context can be made: CUDA_VISIBLE_DEVICES names nothing, or a device that this machine has not."""
    source = write_corpus(tmp_path / "text")
    config = tmp_path / "run.toml"
    config.write_text(to_toml(run_config(tmp_path, data={"source": source}, train={"device": "cuda"})))
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    words = ("--standalone", "--nproc-per-node=1", "--max-restarts=3", "-m", "flashckpt.trainer", "--config", config)
    code, output = run_dlrun(tmp_path, *words, env={"CUDA_VISIBLE_DEVICES": visible, "PYTHONPATH": path})
    assert 'train.device = "cuda", but no CUDA device is available' in output, output
    assert code == 10
    assert output.count("started rank 0") == 1, "another start would end the same"
