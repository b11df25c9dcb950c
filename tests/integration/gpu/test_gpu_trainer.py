"""The trainer on a GPU in bfloat16: killed and resumed with the losses of the unbroken run; a model of a billion parameters."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from support.dlrun import dlrun, run_dlrun
from support.training import run_config, write_corpus

from flashckpt.errors import FlashckptError
from flashckpt.shm.segment import Segment
from flashckpt.trainer.config import read_config, to_toml, to_values
from flashckpt.trainer.config.model import ModelConfig
from flashckpt.trainer.demo.report import compare_traces, read_restores
from flashckpt.trainer.model.operators import per_token_loss
from flashckpt.trainer.model.transformer import Transformer
from flashckpt.trainer.train.metrics import read_trace
from integration.gpu.device import device, device_type, gpu, in_time

__all__ = ["device", "device_type", "gpu", "in_time"]
pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("default"),
]  # the compiler's warnings are no failures
ROOT = Path(__file__).resolve().parents[3]
STEPS = 9
TINY, BILLION = ROOT / "configs" / "tiny.toml", ROOT / "configs" / "1b.toml"


def words_and_env(folder: Path, name: str, kind: str, **sections: Any) -> tuple[list[object], dict[str, str]]:
    """Write the run's configuration into a folder of its own; return what dlrun is given."""
    own = folder / name
    own.mkdir()
    model = {**to_values(read_config(TINY))["model"], "dropout": 0.1, **sections.pop("model", {})}
    training = {"steps": STEPS, "seq_len": 32, "global_batch": 8, "micro_batch": 4, "device": kind}
    training |= {"precision": "bfloat16", "deterministic": True, **sections.pop("train", {})}
    source, log = write_corpus(folder / "text"), {"folder": str(own / "log"), "every": 1}
    config = run_config(folder, model=model, train=training, data={"source": source}, log=log, **sections)
    (own / "run.toml").write_text(to_toml(config))
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    words = ["--standalone", "--nproc-per-node=1", "--max-restarts=2", "-m", "flashckpt.trainer"]
    return [*words, "--config", own / "run.toml"], {"PYTHONPATH": path, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def train(folder: Path, name: str, kind: str, *, crash_at: str = "", **sections: Any) -> tuple[Path, str]:
    """Train to the end under dlrun; return (folder of the log, output)."""
    words, env = words_and_env(folder, name, kind, **sections)
    env |= {"FLASHCKPT_CRASH_AT": crash_at} if crash_at else {}
    code, output = run_dlrun(folder / name, *words, env=env, deadline_s=300)
    assert code == 0, output
    return folder / name / "log", output


def has_complete_snapshot(folder: Path) -> bool:
    for path in folder.rglob("*.seg"):
        with contextlib.suppress(FlashckptError, OSError), contextlib.closing(Segment.attach(path)) as segment:
            if any(header.is_complete for header in segment.headers()):
                return True
    return False


def checkpoints(folder: Path, job: str, **more: Any) -> dict[str, Any]:
    return {"root": str(folder / job / "root"), "job": f"gpu-{job}", "snapshot_every": 2, "persist_every": 1000, **more}


def test_a_killed_run_in_bfloat16_has_the_trace_of_the_unbroken_one(device_type: str, tmp_path: Path) -> None:
    extra = {"compile": device_type == "cuda"}  # without a GPU the compiler takes most of the part's time
    unbroken, _ = train(tmp_path, "unbroken", device_type, train=extra)
    killed, output = train(
        tmp_path, "killed", device_type, train=extra, checkpoint=checkpoints(tmp_path, "killed"),
        crash_at="slot.after-writing:4",
    )  # fmt: skip
    assert output.count("signal 9 (SIGKILL") == 1, output
    (restored,) = read_restores(killed)
    assert (restored.step, set(restored.tiers)) == (6, {"memory"})
    result = compare_traces(read_trace(unbroken / "trace.jsonl"), read_trace(killed / "trace.jsonl"), STEPS)
    assert result.identical, result.first


@pytest.mark.parametrize("window", [0, 100])
def test_flex_attention_trains_as_attention_with_a_mask_does(window: int, gpu: torch.device) -> None:
    torch.manual_seed(1)
    size = ModelConfig(dim=256, layers=2, heads=4, kv_heads=2, ffn=512, vocab=512, window=window)
    model = Transformer(size, 384).to(gpu)
    tokens = torch.randint(512, (2, 384), device=gpu)
    documents = (torch.arange(384, device=gpu) // 150).expand(2, 384)
    found = []
    for uses_flex in (False, True):
        model.uses_flex, model._positions = uses_flex, None
        model.zero_grad()
        logits = model(tokens, documents)
        per_token_loss(logits, tokens).mean().backward()
        found.append([logits.detach(), *(one.grad.clone() for one in model.parameters() if one.grad is not None)])
    for masked, flexed in zip(*found, strict=True):
        torch.testing.assert_close(flexed, masked, atol=2e-3, rtol=2e-2)  # kernels may multiply in TF32


def test_a_billion_parameters_are_killed_and_go_on_from_memory(device_type: str, shm_dir: Path, tmp_path: Path) -> None:
    if device_type == "cpu":
        pytest.skip("needs a GPU: a billion parameters take minutes per step without one")
    plan = to_values(read_config(BILLION))
    words, env = words_and_env(
        tmp_path, "billion", device_type, model={**plan["model"], "dropout": 0.0},
        train={**plan["train"], "device": device_type, "steps": 100_000, "seq_len": 512, "global_batch": 8, "deterministic": False},
        checkpoint=checkpoints(tmp_path, "billion"),
    )  # fmt: skip
    assert (plan["train"]["precision"], plan["train"]["compile"]) == ("bfloat16", True)
    log = tmp_path / "billion" / "log"
    with dlrun(tmp_path / "billion", *words, env=env) as launch:
        launch.until(lambda: has_complete_snapshot(shm_dir), "a COMPLETE snapshot")
        (pid,) = re.findall(r"started rank 0 pid (\d+)", launch.output)
        os.kill(int(pid), signal.SIGKILL)
        launch.until((log / "restores.jsonl").exists, "the restore")
        (restored,) = read_restores(log)
        launch.until(lambda: read_trace(log / "trace.jsonl")[-1]["step"] >= restored.step + 3, "steps behind it")
    assert set(restored.tiers) == {"memory"}
    steps = [line["step"] for line in read_trace(log / "trace.jsonl")]
    assert steps == list(range(1, steps[-1] + 1))
