"""A model is asked: the cache gives the logits of the whole pass, text never breaks a character, and wrong input is one error.

That transformers generates the same tokens is shown by `make test-hub` (hub.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import flashckpt.session.checkpointer  # noqa: F401 -- imported before the fork, so that ranks start in 0.2 s
from flashckpt.dcp import direct_writer
from flashckpt.errors import ConfigError, NoCheckpointError
from flashckpt.trainer.__main__ import main
from flashckpt.trainer.config.model import ModelConfig
from flashckpt.trainer.config.sample import Choice
from flashckpt.trainer.generate.codec import LibraryStream, TextCodec
from flashckpt.trainer.generate.sampling import Chooser, continuation
from flashckpt.trainer.hub.families import tensors_of
from flashckpt.trainer.hub.hub_config import to_hub
from flashckpt.trainer.model.cache import KeyValueCache
from flashckpt.trainer.model.initial import fill
from flashckpt.trainer.model.transformer import Transformer

SMALL: dict[str, Any] = {"dim": 32, "layers": 3, "heads": 4, "kv_heads": 2, "ffn": 48}
MODELS = {
    "plain": ModelConfig(**SMALL),
    "every head its own": ModelConfig(**SMALL | {"kv_heads": 4}),
    "wide heads, norm, bias": ModelConfig(**SMALL, head_dim=12, qk_norm=True, qkv_bias=True),
    "window": ModelConfig(**SMALL, window=5),
    "window from a layer on": ModelConfig(**SMALL, window=5, window_from=1),
    "window beyond the text": ModelConfig(**SMALL, window=100),
    "llama 3": ModelConfig(**SMALL, rope_scaling="llama3", rope_factor=8.0, rope_context=8),
    "yarn": ModelConfig(**SMALL, rope_scaling="yarn", rope_factor=4.0, rope_context=8),
    "ntk": ModelConfig(**SMALL, rope_scaling="ntk", rope_factor=2.0, rope_context=8),
    "linear, tied": ModelConfig(**SMALL, rope_scaling="linear", rope_factor=2.0, tied_embeddings=True),
    "experts": ModelConfig(**SMALL, experts=4),
    "shared experts": ModelConfig(**SMALL, experts=4, shared_ffn=24, normalize_experts=False, window=6),
}
LENGTH = 24


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(direct_writer, "_claims", {})
    monkeypatch.setenv("FLASHCKPT_SHM_DIR", str(tmp_path / "memory"))
    (tmp_path / "memory").mkdir()


def model_of(config: ModelConfig, length: int = LENGTH) -> Transformer:
    """Return a model whose logits differ widely: ten times the weights that training begins with."""
    model = Transformer(config, length).eval()
    fill(model, config, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10.0 if parameter.dim() > 1 else 1.0)
    return model


# -- the cache


@pytest.mark.matrix
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("steps", [[LENGTH], [1] * LENGTH, [7, 1, 1, 4, 1, 9, 1]], ids=["whole", "one by one", "mixed"])
@torch.no_grad()
def test_logits_with_the_cache_are_those_of_the_whole_pass(name: str, steps: list[int]) -> None:
    config = MODELS[name]
    model, tokens = model_of(config), torch.randint(0, 256, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    wanted = model(tokens)
    cache = KeyValueCache(capacity=LENGTH, window=config.window)
    found = torch.cat([model.step(part, cache) for part in torch.split(tokens, steps, 1)], 1)
    assert wanted.std() > 0.5
    assert float((found - wanted).abs().max()) < 1e-5 * max(1.0, float(wanted.abs().max()))
    assert cache.length == LENGTH


@torch.no_grad()
def test_greedy_text_is_that_of_whole_passes() -> None:
    config = MODELS["shared experts"]
    model, text = model_of(config), [5, 6, 7]
    found = list(continuation(model, text, Chooser(Choice(temperature=0.0)), most=12, ends=()))
    wanted = list(text)
    for _ in range(12):
        wanted.append(int(model(torch.tensor([wanted]))[0, -1].argmax()))
    assert text + found == wanted
    ends = {found[5]}
    first = found.index(found[5])
    assert list(continuation(model, text, Chooser(Choice(temperature=0.0)), most=12, ends=ends)) == found[:first]


# -- the choice


def drawn(logits: list[float], **choice: Any) -> list[int]:
    chooser = Chooser(Choice(**choice))
    return [chooser.next(torch.tensor(logits)) for _ in range(400)]


def test_tokens_are_chosen_by_temperature_and_probability() -> None:
    logits = [2.0, 1.0, 0.0, -1.0]  # 0.644, 0.237, 0.087, 0.032
    assert set(drawn(logits, temperature=0.0)) == {0}
    assert set(drawn(logits, temperature=1.0)) == {0, 1, 2, 3}
    assert set(drawn(logits, temperature=1.0, top_p=0.85)) == {0, 1}
    assert set(drawn(logits, temperature=1.0, top_p=0.001)) == {0}
    shares = [drawn(logits, temperature=t).count(0) for t in (0.3, 1.0, 10.0)]
    assert shares[0] > 350 > 290 > shares[1] > 220 > shares[2]


def test_the_same_seed_draws_the_same_and_moves_no_other_random_state() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    one, same, other = (drawn([1.0, 0.9, 0.8], temperature=1.0, seed=seed) for seed in (1, 1, 2))
    assert one == same != other
    assert torch.equal(torch.get_rng_state(), before)


# -- text


def test_bytes_never_show_half_a_character() -> None:
    text = "aé€😀z"
    codec = TextCodec(b"")
    tokens = codec.encode(text, 256)
    stream = codec.stream()
    assert [stream.push(token) for token in tokens] == ["a", "", "é", "", "", "€", "", "", "", "😀", "z"]
    assert stream.finish() == ""
    for token in tokens[:5]:
        stream.push(token)
    assert stream.finish() == "\ufffd"
    assert codec.encode("", 256) == [0]
    assert codec.ends == {0}


def test_tokens_of_a_library_never_show_half_a_character() -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="`make setup` installs it")
    from flashckpt.trainer.prepare.vocabulary import train_bpe

    content = train_bpe(["the cat sat on the mat " * 50], 266)
    codec = TextCodec(content)
    assert codec.ends == {tokenizers.Tokenizer.from_str(content.decode()).token_to_id("<|endoftext|>")}
    text = "the cat é€😀 " + "\ufffd" + " the mat"
    tokens = codec.encode(text, 266)
    stream = codec.stream()
    shown = [stream.push(token) for token in tokens]
    assert "".join([*shown, stream.finish()]) == text
    assert "".join(shown).count("\ufffd") == 1
    half = codec.stream(codec.encode("a", 266))
    assert [half.push(token) for token in codec.encode("😀", 266)[:-1]] == ["", "", ""]
    assert "\ufffd" in half.finish()
    broken = LibraryStream(tokenizers.Tokenizer.from_str(content.decode()), [])
    first = codec.encode("😀", 266)[0]
    assert any(broken.push(first) for _ in range(LibraryStream._MOST))  # what becomes no character is shown at last


# -- the command, on roots, folders and memory


def asked(capsys: Any, *words: str, code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["generate", *words, "--json"]) == code
    out = capsys.readouterr().out
    return dict(json.loads(out)) if code == 0 else {}


def write_folder(folder: Path, config: ModelConfig, **changes: Any) -> Path:
    """Write a Hugging Face folder with a tokenizer of bytes."""
    from flashckpt.trainer.prepare.vocabulary import byte_tokenizer

    model = model_of(config)
    held = dict(model.named_parameters())
    tensors = {
        one.theirs: (held[one.ours] if one.expert is None else held[one.ours][one.expert]).detach().clone()
        for one in tensors_of(config)
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(to_hub(config, LENGTH, "float32") | changes))
    for name, content in byte_tokenizer().items():
        (folder / name).write_bytes(content)
    return folder


def test_a_folder_is_asked_and_stops_at_its_end_token(tmp_path: Path, capsys: Any) -> None:
    config = replace(MODELS["plain"], context=LENGTH)
    folder = write_folder(tmp_path / "hf", config)
    found = asked(capsys, str(folder), "abc", "--temperature", "0", "--max-tokens", "10")
    wanted = list(continuation(model_of(config), list(b"abc"), Chooser(Choice(temperature=0.0)), most=10, ends=[0]))
    assert found["tokens"] == wanted
    last = wanted[-1]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [last, 3]}))
    ended = asked(capsys, str(folder), "abc", "--temperature", "0", "--max-tokens", "10")
    assert ended["tokens"] == wanted[: wanted.index(last)]
    assert ended["stopped"] == "end"
    assert main(["hub", "import", str(folder), str(tmp_path / "root")]) == 0
    assert (
        asked(capsys, str(tmp_path / "root"), "abc", "--temperature", "0", "--max-tokens", "10")["tokens"]
        == ended["tokens"]
    )
    assert load_file(folder / "model.safetensors")


WRONG: list[tuple[list[str], int, str]] = [
    (["SOURCE"], ConfigError.exit_code, "Missing argument 'PROMPT'"),
    (["NOTHING", "x"], ConfigError.exit_code, "'NOTHING' is no model"),
    (["", "x"], ConfigError.exit_code, "'' is no model"),
    (["FILE", "x"], ConfigError.exit_code, "found: a file"),
    (["memory://x", "x"], ConfigError.exit_code, "is no model"),
    (["EMPTY", "x"], NoCheckpointError.exit_code, "is empty"),
    (["HUB", "x", "--step", "3"], ConfigError.exit_code, "--step has no effect"),
    (["HUB", "x", "--temperature", "-1"], ConfigError.exit_code, "--temperature is out of range"),
    (["HUB", "x", "--temperature", "nan"], ConfigError.exit_code, "--temperature is out of range"),
    (["HUB", "x", "--top-p", "0"], ConfigError.exit_code, "--top-p is out of range"),
    (["HUB", "x", "--max-tokens", "0"], ConfigError.exit_code, "--max-tokens is out of range"),
    (["HUB", "x", "--seed", "-3"], ConfigError.exit_code, "--seed is out of range"),
    (["HUB", "x", "--seed", "y"], ConfigError.exit_code, "'y' is not a valid integer"),
    (["HUB", "x", "--tokenizer", "NOTHING"], ConfigError.exit_code, "the tokenizer NOTHING cannot be read"),
    (["HUB", "x", "--tokenizer", "EMPTY"], ConfigError.exit_code, "holds no tokenizer"),
    (["HUB", "x" * LENGTH], ConfigError.exit_code, "the prompt is longer than the model's context"),
    (["SILENT", "x"], ConfigError.exit_code, "no tokenizer is known"),
    (["HUB", "x", "--live"], NoCheckpointError.exit_code, "no job in this machine's memory writes to"),
    (["IMPORTED", "x", "--step", "9"], NoCheckpointError.exit_code, "has no checkpoint of step 9"),
    (["IMPORTED", "x", "--step", "new"], ConfigError.exit_code, "a step cannot be read"),
]
ALL = """
import contextlib, io, json, sys
from flashckpt.trainer.__main__ import main
found = []
for words in json.load(sys.stdin):
    with contextlib.redirect_stderr(io.StringIO()) as errors, contextlib.redirect_stdout(io.StringIO()) as out:
        code = main(["generate", *words])
    found.append([code, out.getvalue(), errors.getvalue()])
assert "torch" not in sys.modules
print(json.dumps(found))
"""


def test_wrong_input_is_one_error_before_torch(tmp_path: Path) -> None:
    config = replace(MODELS["plain"], context=LENGTH)
    folder = write_folder(tmp_path / "hf", config)
    silent = write_folder(tmp_path / "silent", config)
    (silent / "tokenizer.json").unlink()
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    assert main(["hub", "import", str(folder), str(tmp_path / "root")]) == 0
    places = {"HUB": "hf", "SILENT": "silent", "EMPTY": "empty", "FILE": "file", "IMPORTED": "root"}
    asked = [[str(tmp_path / places[word]) if word in places else word for word in words] for words, _, _ in WRONG]
    done = subprocess.run(
        [sys.executable, "-c", ALL], input=json.dumps(asked), capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    for (words, code, named), (found, out, errors) in zip(WRONG, json.loads(done.stdout), strict=True):
        assert (found, out) == (code, ""), (words, errors)
        assert named in " ".join(errors.split()), words
        assert f"exit code {code}" in errors


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("tokenizers", reason="`make setup` installs it")
    from flashckpt.trainer.prepare.vocabulary import train_bpe

    folder = write_folder(tmp_path / "hf", replace(MODELS["plain"], context=LENGTH))
    (tmp_path / "tokenizer.json").write_bytes(train_bpe(["the cat sat on the mat " * 50], 266))
    assert main(["generate", str(folder), "the cat", "--tokenizer", str(tmp_path / "tokenizer.json")]) == 10
    assert "is not that of the model" in capsys.readouterr().err


@pytest.mark.matrix
def test_a_reader_that_has_seen_enough_ends_it_quietly(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf", replace(MODELS["plain"], context=4000))
    command = [sys.executable, "-m", "flashckpt.trainer", "generate", str(folder), "ab", "--max-tokens", "3000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(2) == b"ab"
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
