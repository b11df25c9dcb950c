"""`make test-hub`: models come from and go to Hugging Face folders, judged by transformers itself.

Small random models of each family, dense and with experts, tied and not. Not part of `make test`: transformers is
installed into an environment of its own.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.ranks import run_ranks, values
from support.training import run_config, write_corpus

import flashckpt.session.checkpointer  # noqa: F401 -- imported before the fork, so that ranks start in 0.2 s
from flashckpt.dcp import direct_writer
from flashckpt.errors import ConfigError
from flashckpt.trainer.__main__ import main
from flashckpt.trainer.config import RunConfig, from_values, to_values
from flashckpt.trainer.evaluate.check import check
from flashckpt.trainer.hub.hub_config import from_hub
from flashckpt.trainer.hub.source import HubFolder
from flashckpt.trainer.hub.start import with_model_of_weights
from flashckpt.trainer.hub.weights import load
from flashckpt.trainer.model.positions import rotate
from flashckpt.trainer.model.transformer import Transformer
from flashckpt.trainer.parallel.distributed import process_group
from flashckpt.trainer.prepare.vocabulary import byte_tokenizer
from flashckpt.trainer.train import loop

transformers = pytest.importorskip("transformers")

TOKENS = 24
SIZES = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_experts": 4}
LLAMA31 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 2": ("LlamaConfig", {}),
    "llama 3.1": ("LlamaConfig", {"rope_parameters": LLAMA31, "head_dim": 16}),
    "llama 3.2, tied": ("LlamaConfig", {"rope_parameters": LLAMA31, "tie_word_embeddings": True}),
    "linear": ("LlamaConfig", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "ntk": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "max_position_embeddings": 16},
    ),
    "mistral, window": ("MistralConfig", {"sliding_window": 7}),
    "mistral, wide heads": ("MistralConfig", {"sliding_window": None, "head_dim": 24}),
    "qwen 2.5": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen 2, yarn": ("Qwen2Config", {"rope_parameters": YARN}),
    "qwen 2, windows from a layer on": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    ),
    "qwen 3": ("Qwen3Config", {"head_dim": 16}),
    "qwen 3, tied, yarn": ("Qwen3Config", {"head_dim": 16, "tie_word_embeddings": True, "rope_parameters": YARN}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "sliding_window": None}),
    "mixtral, window": ("MixtralConfig", {"num_local_experts": 4, "sliding_window": 6, "num_experts_per_tok": 3}),
    "qwen 2 moe": ("Qwen2MoeConfig", {**EXPERTS, "shared_expert_intermediate_size": 40}),
    "qwen 2 moe, tied, normalized": (
        "Qwen2MoeConfig",
        {**EXPERTS, "shared_expert_intermediate_size": 40, "norm_topk_prob": True, "tie_word_embeddings": True},
    ),
    "qwen 3 moe": ("Qwen3MoeConfig", {**EXPERTS, "norm_topk_prob": True, "head_dim": 16}),
    "qwen 3 moe, not normalized": ("Qwen3MoeConfig", {**EXPERTS, "norm_topk_prob": False, "head_dim": 16}),
}


@pytest.fixture(autouse=True)
def _apart(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(direct_writer, "_claims", {})
    monkeypatch.setenv("FLASHCKPT_SHM_DIR", str(tmp_path))


def make_theirs(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Save a random model of a case, norms and biases too; return it."""
    kind, settings = CASES[name]
    config = getattr(transformers, kind)(**{**SIZES, **settings}, attn_implementation="eager")
    torch.manual_seed(len(name))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.to(dtype).save_pretrained(folder)
    return model.float()


@pytest.mark.parametrize("name", CASES)
def test_a_key_that_is_not_there_means_what_it_means_to_transformers(name: str, tmp_path: Path) -> None:
    make_theirs(name, tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    kind = type(transformers.AutoConfig.from_pretrained(tmp_path))
    for key in said.keys() - {"model_type"}:
        left = {other: value for other, value in said.items() if other != key}
        try:
            found = from_hub(left, key)
        except ConfigError:
            continue
        assert found == from_hub({**kind(**left).to_dict(), "model_type": said["model_type"]}, key), key


def tokens() -> torch.Tensor:
    return torch.randint(0, 256, (2, TOKENS), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def theirs(folder: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    logits: torch.Tensor = model(tokens()).logits
    return logits


@torch.no_grad()
def ours(folder: Path) -> torch.Tensor:
    source = HubFolder(folder)
    model = Transformer(source.model, TOKENS).eval()
    load([model], source)
    logits: torch.Tensor = model(tokens())
    return logits


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    assert one.std() > 0.1  # logits that say something
    scale = max(1.0, float(one.abs().max()))  # rounding is relative: a CPU sums in its own order
    assert float((one - other).abs().max()) < 1e-5 * scale


def same_tensors(one: Path, other: Path) -> None:
    a, b = (
        {k: v for path in sorted(f.glob("*.safetensors")) for k, v in load_file(path).items()} for f in (one, other)
    )
    assert a.keys() == b.keys()
    for key, value in a.items():
        assert value.dtype == b[key].dtype
        assert torch.equal(value.view(torch.uint8), b[key].view(torch.uint8)), key


@pytest.mark.parametrize("name", CASES)
def test_an_imported_model_gives_their_logits(name: str, tmp_path: Path) -> None:
    model = make_theirs(name, tmp_path / "hf")
    with torch.no_grad():
        wanted = model(tokens()).logits
    close(wanted, ours(tmp_path / "hf"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_there_and_back_is_the_same_to_the_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    make_theirs(name, tmp_path / "hf", dtype)
    assert main(["hub", "import", str(tmp_path / "hf"), str(tmp_path / "root")]) == 0
    assert main(["hub", "export", str(tmp_path / "root"), str(tmp_path / "back")]) == 0
    same_tensors(tmp_path / "hf", tmp_path / "back")
    assert torch.equal(theirs(tmp_path / "hf"), theirs(tmp_path / "back"))
    before, after = (json.loads((tmp_path / f / "config.json").read_text()) for f in ("hf", "back"))
    assert (before["model_type"], before["eos_token_id"]) == (after["model_type"], after["eos_token_id"])


# -- in three dimensions


def run_from(_rank: int, config_values: Any, steps: int) -> Any:
    """Take up weights, train some steps with a checkpoint at the end, and return the logits where they are."""
    config = from_values(config_values)
    layout = loop.prepare(config, int(os.environ["WORLD_SIZE"]))
    with process_group(config) as device:
        trainer = loop.Trainer(config, layout, device)
        trainer._restore()
        for _ in range(steps):
            trainer.one_step()
        micro = layout.local_batch // layout.micro_batches
        assert micro == 2
        for part in trainer.parallel.parts:
            part.eval()
        with torch.no_grad():
            logits = trainer.parallel.forward_only([tokens()])
        if trainer.ckpt is not None:
            trainer.ckpt.wait(100)
            trainer.ckpt.close()
        return logits[0].tolist() if logits else None


@pytest.mark.parametrize("name", ["llama 3.2, tied", "qwen 2.5", "qwen 3", "mixtral", "qwen 2 moe, tied, normalized"])
def test_2x2x2_takes_a_model_trains_it_and_gives_it_back(name: str, tmp_path: Path) -> None:
    model = make_theirs(name, tmp_path / "hf")
    source = write_corpus(tmp_path / "text")
    config = run_config(
        tmp_path,
        parallel={"pp": 2, "tp": 2},
        train={"seq_len": TOKENS, "global_batch": 8, "micro_batch": 2, "steps": 2},
        data={"source": source},
        checkpoint={"root": str(tmp_path / "root"), "snapshot_every": 1, "persist_every": 2, "job": "hub"},
        init={"from": str(tmp_path / "hf")},
        model=to_values(RunConfig())["model"],
    )
    config = with_model_of_weights(config)
    with torch.no_grad():
        wanted = model(tokens()).logits
    untrained = to_values(config) | {"checkpoint": {}}
    for logits in filter(None, values(run_ranks(run_from, 8, untrained, 0, timeout_s=100))):
        close(wanted, torch.tensor(logits))
    trained = [one for one in values(run_ranks(run_from, 8, to_values(config), 2, timeout_s=100)) if one]
    assert main(["hub", "export", str(tmp_path / "root"), str(tmp_path / "back")]) == 0
    found = theirs(tmp_path / "back")
    close(found, torch.tensor(trained[0]))
    assert float((found - wanted).abs().max()) > 1e-3  # it has been trained


def test_a_model_of_bytes_goes_out_with_its_tokenizer(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "text")
    config = run_config(
        tmp_path,
        train={"steps": 2},
        data={"source": source},
        checkpoint={"root": str(tmp_path / "root"), "snapshot_every": 1, "persist_every": 2, "job": "hub"},
    )
    assert values(run_ranks(train_to_the_end, 1, to_values(config), timeout_s=100)) == [0]
    assert main(["hub", "export", str(tmp_path / "root"), str(tmp_path / "out")]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "Straße, 日本 \n\t'quoted' 🙂"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert theirs(tmp_path / "out").shape == (2, TOKENS, 256)


@pytest.mark.parametrize("wrong", [False, True])
def test_check_asks_transformers_too(wrong: bool, tmp_path: Path, monkeypatch: Any) -> None:
    config = run_config(tmp_path, model={"qk_norm": True}, data={"source": write_corpus(tmp_path / "text")})
    if wrong:
        monkeypatch.setattr("flashckpt.trainer.model.transformer.rotate", turn_neighbours)
    (found,) = run_ranks(check_rank, 1, to_values(config), timeout_s=100)
    if wrong:
        assert "computes other logits than Qwen3ForCausalLM" in found.error
    else:
        assert found.value["loss"] < 1e-5
        assert found.value["logits"] < 1e-5


def turn_neighbours(x: torch.Tensor, tables: Any) -> torch.Tensor:
    """Turn pairs of neighbours instead of halves: trains as well, and is another model."""
    x = x.view(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)
    return rotate(x, tables)


def check_rank(_rank: int, config_values: Any) -> Any:
    result = check(from_values(config_values))
    assert result is not None
    return {"loss": result.loss, "logits": result.logits}


def train_to_the_end(_rank: int, config_values: Any) -> int:
    config = from_values(config_values)
    layout = loop.prepare(config, int(os.environ["WORLD_SIZE"]))
    with process_group(config) as device:
        return loop.Trainer(config, layout, device).run()


# -- what it says


def said_by_theirs(model: Any, prompt: torch.Tensor, count: int) -> list[int]:
    """Return the greedy continuation of transformers' own `generate`, with its cache."""
    out = model.generate(
        prompt, max_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=None, use_cache=True
    )
    return [int(token) for token in out[0, prompt.shape[1] :]]


@pytest.mark.parametrize("name", CASES)
def test_greedy_text_is_that_of_transformers(name: str, tmp_path: Path, capsys: Any) -> None:
    model = make_theirs(name, tmp_path / "hf")
    for file, content in byte_tokenizer().items():
        (tmp_path / "hf" / file).write_bytes(content)
    for file in ("config.json", "generation_config.json"):  # random models say their end token soon
        path = tmp_path / "hf" / file
        settings = json.loads(path.read_text()) | {"eos_token_id": 319}
        path.write_text(json.dumps(settings))
    prompt = list(b"abcdef")
    count = 8  # with the prompt below 16, from where on the cache of "ntk" would hold keys that were turned otherwise
    wanted = said_by_theirs(model, torch.tensor([prompt]), count)
    capsys.readouterr()
    command = ["generate", str(tmp_path / "hf"), "abcdef", "--temperature", "0", "--max-tokens", str(count), "--json"]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["prompt_tokens"] == prompt
    assert found["tokens"] == (wanted[: wanted.index(319)] if 319 in wanted else wanted)
    assert len(set(wanted)) > 1  # text that says something
