"""The tokenizer of a run beside its checkpoints, and exports that need the root alone."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from flashckpt.errors import NoCheckpointError
from flashckpt.storage.factory import open_store
from flashckpt.trainer.config import RunConfig, from_values
from flashckpt.trainer.config.model import ModelConfig
from flashckpt.trainer.flops import count_parameters
from flashckpt.trainer.generate.subject import open_subject
from flashckpt.trainer.hub import tokenizer_hook
from flashckpt.trainer.hub.families import tensors_of
from flashckpt.trainer.hub.hub_config import to_hub
from flashckpt.trainer.hub.root_files import FOLDER, digest_of_files, keep, kept
from flashckpt.trainer.hub.tokenizer_files import files_of_run
from flashckpt.trainer.hub.tokenizer_hook import TokenizerHooks
from flashckpt.trainer.hub.transfer import export_folder, import_folder
from flashckpt.trainer.plan.command import plan
from flashckpt.trainer.train.hooks import HookedRun

TEXT = [{"kind": "text", "urls": ["*.txt"]}]
WORDS = json.dumps({"added_tokens": [{"id": 9, "content": "<|endoftext|>"}]}).encode()
MODEL = ModelConfig(layers=1, dim=16, heads=2, kv_heads=2, ffn=16, vocab=32)


def tokenizer(folder: Path, content: bytes = WORDS, **others: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_bytes(content)
    for name, text in others.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def run(**values: Any) -> RunConfig:
    return from_values({"model": {"vocab": 300}, **values})


def test_files_are_written_once_and_the_newest_whole_ones_are_read(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "root"))
    assert kept(store) == {}
    keep(store, first := {"tokenizer.json": b"one"})
    path = tmp_path / "root" / FOLDER / digest_of_files(first) / "tokenizer.json"
    before = path.stat()
    keep(store, first)
    assert path.stat() == before
    assert kept(store) == first
    keep(store, second := {"tokenizer.json": b"two", "chat_template.jinja": b"{{ x }}"})
    assert kept(store) == second
    (tmp_path / "root" / FOLDER / digest_of_files(second) / "tokenizer.json").write_bytes(b"cut")
    assert kept(store) == first


def test_what_somebody_else_put_there_is_passed_over(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put(f"{FOLDER}/README", b"mine")
    keep(store, {"tokenizer.json": WORDS})
    assert kept(store) == {"tokenizer.json": WORDS}


def test_a_chat_template_goes_with_the_tokenizer_beside_which_it_lies(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer(tmp_path / "words", chat_template__jinja="{{ hello }}", config__json="{}")
    found = files_of_run(run(data={"tokenizer": "words", "sources": TEXT}))
    assert found == {"tokenizer.json": WORDS, "chat_template.jinja": b"{{ hello }}"}
    origin = run(data={"tokenizer": "words", "sources": TEXT}, init={"from": "words"})
    assert files_of_run(origin).keys() == {"tokenizer.json", "chat_template.jinja", "config.json"}
    tokenizer(tmp_path / "others", b"{}", config__json="{}")
    assert files_of_run(run(data={"tokenizer": "words", "sources": TEXT}, init={"from": "others"})) == found
    assert files_of_run(RunConfig()) == {}  # on bytes


def hooked(config: RunConfig) -> None:
    parallel: Any = None
    hooks = TokenizerHooks(HookedRun(config=config, parallel=parallel))
    for after in (0, 5):  # again with the next phase
        hooks.opened(config, parallel, after)
    hooks.close()


def test_a_run_leaves_its_tokenizer_on_its_root(tmp_path: Path, caplog: Any, monkeypatch: Any) -> None:
    words, root = tokenizer(tmp_path / "words"), tmp_path / "root"
    data = {"tokenizer": str(words), "sources": TEXT}
    monkeypatch.setenv("RANK", "1")
    hooked(run(data=data, checkpoint={"root": str(root)}))
    assert not root.exists()
    monkeypatch.setenv("RANK", "0")
    hooked(run(data=data, checkpoint={"root": str(root)}))
    assert kept(open_store(str(root))) == {"tokenizer.json": WORDS}
    hooked(run(data=data, checkpoint={"root": ""}))
    blocked = tmp_path / "blocked"
    blocked.write_text("a file")
    with caplog.at_level(logging.WARNING, logger=tokenizer_hook.__name__):
        hooked(run(data=data, checkpoint={"root": str(blocked)}))
    assert "the tokenizer was not written beside the checkpoints" in caplog.text


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root without a tokenizer in its checkpoint, and without the folder that it came from."""
    folder = tmp_path / "hf"
    folder.mkdir()
    save_file({one.theirs: torch.zeros(one.shape) for one in tensors_of(MODEL)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**to_hub(MODEL, 32, "float32"), "eos_token_id": None}))
    import_folder(folder, str(tmp_path / "root"), step=3)
    shutil.rmtree(folder)
    return tmp_path / "root"


def test_an_export_of_a_root_alone_has_tokenizer_end_and_card(root: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir("/")
    assert not export_folder(str(root), tmp_path / "mute")["has_tokenizer"]
    keep(open_store(str(root)), {"tokenizer.json": WORDS, "chat_template.jinja": b"{{ hello }}"})
    out = tmp_path / "out"
    assert export_folder(str(root), out)["has_tokenizer"]
    assert (out / "tokenizer.json").read_bytes() == WORDS
    assert (out / "chat_template.jinja").read_bytes() == b"{{ hello }}"
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == 9
    assert json.loads((out / "generation_config.json").read_text()) == {"eos_token_id": 9}
    assert json.loads((out / "tokenizer_config.json").read_text())["eos_token"] == "<|endoftext|>"
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "| step | 3 |" in card
    assert f"| parameters | {sum(torch.zeros(one.shape).numel() for one in tensors_of(MODEL)):,} |" in card
    assert "not in this folder" not in card
    assert "not in this folder" in (tmp_path / "mute" / "README.md").read_text()
    export_folder(str(root), out, force=True)  # a card does not make it somebody else's


def test_text_is_made_of_a_root_alone(root: Path, monkeypatch: Any) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 0, "<|endoftext|>": 1}, unk_token="the"))
    keep(open_store(str(root)), {"tokenizer.json": words.to_str().encode()})
    monkeypatch.chdir("/")
    subject = open_subject(str(root))
    try:
        assert subject.codec.encode("the", MODEL.vocab) == [0]
    finally:
        subject.weights.close()


def test_a_plan_of_a_root_alone_is_of_the_run_that_it_holds(root: Path, capfd: Any) -> None:
    words = ["--gpus", "1", "--gpu", "h100", "--json", "--checkpoint.root", str(root)]
    assert plan([*words, "--train.micro_batch", "4"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["model"]["parameters"] == count_parameters(MODEL)
    assert found["layout"]["micro_batch"] == 4
    with pytest.raises(NoCheckpointError):
        plan([*words[:-1], str(root / "nowhere")])
