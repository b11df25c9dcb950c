"""Hugging Face folders in and out without transformers: names, config.json, boxes, bits, and what is refused.

That transformers computes the same logits is shown by `make test-hub` (hub.py).
"""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.ranks import run_ranks, values
from support.training import run_config, train_rank, write_corpus

from flashckpt.dcp import direct_writer
from flashckpt.errors import ConfigError, DamagedError, FlashckptError, NoCheckpointError
from flashckpt.interop import safetensors_files as st
from flashckpt.storage.factory import open_store
from flashckpt.trainer.__main__ import main
from flashckpt.trainer.config import RunConfig, from_values, to_values
from flashckpt.trainer.config.model import ModelConfig
from flashckpt.trainer.hub import weights
from flashckpt.trainer.hub.families import FAMILIES, family_of, tensors_of
from flashckpt.trainer.hub.hub_config import from_hub, to_hub
from flashckpt.trainer.hub.source import CheckpointWeights, HubFolder, open_weights
from flashckpt.trainer.hub.start import with_model_of_weights
from flashckpt.trainer.hub.tokenizer_files import files_of_saved
from flashckpt.trainer.hub.transfer import export_folder, import_folder
from flashckpt.trainer.model.transformer import Transformer
from flashckpt.trainer.prepare.vocabulary import byte_tokenizer
from flashckpt.trainer.train.record import RunRecord

SMALL: dict[str, Any] = {"vocab": 256, "dim": 16, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 24}
SPARSE: dict[str, Any] = {**SMALL, "experts": 4, "experts_per_token": 2}
TEXT = [{"kind": "text", "urls": ["x.txt"], "channel": "a"}]
MODELS: dict[str, ModelConfig] = {
    "llama": ModelConfig(
        **SMALL, rope_scaling="llama3", rope_factor=8.0, rope_context=8, rope_low=1.5, rope_high=3.0, context=64
    ),
    "mistral": ModelConfig(**{**SMALL, "vocab": 30}, window=8, head_dim=6),
    "qwen2": ModelConfig(**SMALL, qkv_bias=True, tied_embeddings=True, window=8, window_from=1),
    "qwen3": ModelConfig(
        **SMALL, qk_norm=True, head_dim=8, rope_scaling="yarn", rope_factor=4.0, rope_context=8, rope_beta_fast=16.0
    ),
    "mixtral": ModelConfig(**SPARSE, rope_scaling="linear", rope_factor=2.0),
    "qwen2_moe": ModelConfig(**SPARSE, qkv_bias=True, shared_ffn=20, normalize_experts=False),
    "qwen3_moe": ModelConfig(**SPARSE, qk_norm=True, head_dim=8, tied_embeddings=True, norm_eps=1e-6),
}


@pytest.fixture(autouse=True)
def _first_save(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_writer, "_claims", {})


def write_hub(folder: Path, config: ModelConfig, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Write a folder of random weights as `save_pretrained` does, in two files."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(1)
    names = {one.theirs: one.shape for one in tensors_of(config)}
    tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in names.items()}
    for number, half in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2])):
        save_file({name: tensors[name] for name in half}, folder / f"model-{number + 1:05d}-of-00002.safetensors")
    content = {**to_hub(config, 32, "float32"), "eos_token_id": 7, **changes}
    (folder / "config.json").write_text(json.dumps({key: value for key, value in content.items() if value != "absent"}))
    (folder / "tokenizer.json").write_text('{"a tokenizer": true}')
    return folder


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


# -- names and settings


@pytest.mark.parametrize("name", MODELS)
def test_the_table_names_every_tensor_of_a_model_once_with_its_shape(name: str) -> None:
    model = Transformer(MODELS[name], 16)
    rows = tensors_of(MODELS[name])
    assert family_of(MODELS[name]).name == name
    assert {row.ours: row.whole for row in rows} == {key: tuple(p.shape) for key, p in model.named_parameters()}
    assert sum(math.prod(row.shape) for row in rows) == sum(p.numel() for p in model.parameters())
    theirs = [row.theirs for row in rows]
    assert len(set(theirs)) == len(theirs) - MODELS[name].tied_embeddings


@pytest.mark.parametrize("name", MODELS)
def test_a_model_survives_config_json(name: str) -> None:
    config = MODELS[name]
    found = from_hub(json.loads(json.dumps(to_hub(config, 32, "float32"))), "config.json")
    wanted = replace(config, family=name, context=found.context)
    assert found == wanted
    assert found.context >= 32


def test_both_ways_to_write_positions_are_read() -> None:
    old = to_hub(MODELS["llama"], 32, "float32")
    new = {key: value for key, value in old.items() if not key.startswith("rope_")}
    new["rope_parameters"] = {**old["rope_scaling"], "rope_theta": old["rope_theta"]}
    assert from_hub(new, "") == from_hub(old, "")
    older = {**old, "rope_scaling": {**old["rope_scaling"], "type": "llama3"}}
    del older["rope_scaling"]["rope_type"]
    assert from_hub(older, "") == from_hub(old, "")


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("llama", {"model_type": "gpt_neox"}, "of a family that is not known"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("llama", {"attention_bias": True}, "attention_bias = True"),
        ("llama", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope_parameters.full_attention"),
        ("llama", {"rope_scaling": {"type": "default", "mrope_section": [2, 1]}}, "rope_scaling.mrope_section"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 9.0}}, "rope_scaling.factor"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"hidden_size": "absent"}, "no 'hidden_size'"),
        ("llama", {"hidden_size": "wide"}, "model.dim has the wrong type"),
        ("llama", {"num_attention_heads": 0}, "model.heads is too small"),
        ("llama", {"rope_scaling": "long"}, "cannot be read"),
        ("qwen2_moe", {"mlp_only_layers": [0]}, "mlp_only_layers"),
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 4}, "use_sliding_window"),
        ("qwen2", {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
    ],
)
def test_what_our_model_would_compute_otherwise_is_refused(name: str, change: Any, named: str, tmp_path: Path) -> None:
    folder = write_hub(tmp_path / "hf", MODELS[name], **change)
    with pytest.raises(ConfigError) as refused:
        HubFolder(folder)
    assert named in str(refused.value)
    assert str(folder / "config.json") in str(refused.value)


@pytest.mark.parametrize(("key", "value"), [("num_hidden_layers", 2.5), ("vocab_size", 1), ("rms_norm_eps", -1.0)])
def test_numbers_of_a_config_json_are_judged_as_those_of_a_run(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.(layers|vocab|norm_eps)"):
        HubFolder(write_hub(tmp_path / "hf", MODELS["llama"], **{key: value}))


@pytest.mark.parametrize(
    "config",
    [
        ModelConfig(qk_norm=True, qkv_bias=True),
        ModelConfig(experts=4, shared_ffn=8),
        ModelConfig(experts=4, normalize_experts=False),
        ModelConfig(family="llama", qk_norm=True),
        ModelConfig(family="mixtral"),
    ],
)
def test_a_model_of_no_family_is_refused_by_an_export(config: ModelConfig) -> None:
    with pytest.raises(ConfigError, match=r"no family|does not go with"):
        to_hub(config, 32, "float32")


def test_the_byte_tokenizer_has_each_byte_once() -> None:
    vocab = json.loads(byte_tokenizer()["tokenizer.json"])["model"]["vocab"]
    assert sorted(vocab.values()) == list(range(256))
    assert (vocab["A"], vocab["Ġ"], vocab["Ċ"]) == (65, 32, 10)


# -- there and back


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_import_and_export_keep_every_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = write_hub(tmp_path / "hf", MODELS[name], dtype)
    assert main(["hub", "import", str(folder), str(tmp_path / "root"), "--step", "3"]) == 0
    assert main(["hub", "export", str(tmp_path / "root"), str(tmp_path / "back"), "--step", "3"]) == 0
    before, after = tensors_in(folder), tensors_in(tmp_path / "back")
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert value.dtype == after[key].dtype == dtype
        assert torch.equal(value.view(torch.uint8), after[key].view(torch.uint8)), key
    assert (tmp_path / "back" / "tokenizer.json").read_text() == '{"a tokenizer": true}'
    assert json.loads((tmp_path / "back" / "config.json").read_text())["eos_token_id"] == 7
    assert HubFolder(tmp_path / "back").model == HubFolder(folder).model


def set_dtype(folder: Path, part: str, kind: str) -> None:
    """Change the type that the headers of a folder give to the tensors with `part` in their name."""
    for path in folder.glob("*.safetensors"):
        raw = path.read_bytes()
        (count,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + count])
        for entry in (one for name, one in header.items() if part in name):
            entry["dtype"] = kind
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + count :])


def test_weights_that_are_no_floating_point_numbers_are_not_imported(tmp_path: Path, capsys: Any) -> None:
    """As some programs store bfloat16: the bits are there, and what they mean is not."""
    folder = write_hub(tmp_path / "hf", MODELS["llama"], torch.bfloat16)
    set_dtype(folder, "norm", "U16")
    assert main(["hub", "import", str(folder), str(tmp_path / "root")]) == ConfigError.exit_code
    assert "norm.weight of uint16" in capsys.readouterr().err
    assert not (tmp_path / "root").exists()


def test_experts_of_several_types_are_not_read_as_one(tmp_path: Path, capsys: Any) -> None:
    folder = write_hub(tmp_path / "hf", MODELS["mixtral"], torch.bfloat16)
    set_dtype(folder, "experts.1.w2", "F16")
    assert main(["hub", "import", str(folder), str(tmp_path / "root")]) == ConfigError.exit_code
    assert "experts.1.w2.weight of float16" in capsys.readouterr().err


@pytest.mark.parametrize("settings", [
    {"data": {"tokenizer": "words", "sources": TEXT}}, {"data": {"tokenizer": "words/tokenizer.json", "sources": TEXT}}, {"init": {"from": "words"}, "data": {"tokenizer": "gone", "sources": TEXT}},
    {"init": {"from": "bare"}}, {},
])  # fmt: skip
def test_a_run_has_its_tokenizer_wherever_it_is_asked_for(settings: Any, tmp_path: Path, monkeypatch: Any) -> None:
    for name in ("words", "bare"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "words" / "tokenizer.json").write_text('{"of": "words"}')
    monkeypatch.chdir(tmp_path)
    state = RunRecord(from_values({"model": {"vocab": 300}, **settings})).state_dict()
    monkeypatch.chdir("/")
    origin = settings.get("init", {}).get("from", "")
    saved: Any = SimpleNamespace(
        beside={}, kept=dict, recorded=state["config"], cwd=state["cwd"], init_from=origin, model=RunConfig().model
    )
    found = files_of_saved(saved)["tokenizer.json"]
    assert found == (b'{"of": "words"}' if "words" in str(settings) else byte_tokenizer()["tokenizer.json"])


def test_an_export_says_which_token_ends_a_document(tmp_path: Path) -> None:
    folder = write_hub(tmp_path / "hf", MODELS["llama"], eos_token_id="absent")
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 9, "content": "<|endoftext|>"}]}))
    import_folder(folder, str(tmp_path / "root"))
    export_folder(str(tmp_path / "root"), tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["eos_token_id"] == 9


def test_an_export_casts_and_replaces_only_what_it_wrote(tmp_path: Path, capsys: Any) -> None:
    folder = write_hub(tmp_path / "hf", MODELS["qwen3_moe"])
    root, out = str(tmp_path / "root"), tmp_path / "out"
    main(["hub", "import", str(folder), root])
    capsys.readouterr()
    assert main(["hub", "export", root, str(out), "--dtype", "bf16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["family"] == "qwen3_moe"
    for key, value in tensors_in(out).items():
        assert torch.equal(value, tensors_in(folder)[key].bfloat16())
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert main(["hub", "export", root, str(out)]) == ConfigError.exit_code
    assert main(["hub", "export", root, str(out), "--force"]) == 0
    (out / "notes.txt").write_text("mine")
    assert main(["hub", "export", root, str(out), "--force"]) == ConfigError.exit_code
    assert (out / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["import", "nowhere", "root"], ConfigError.exit_code, "nowhere/config.json cannot be read"),
        (["export", "root", "out", "--step", "9"], NoCheckpointError.exit_code, "no checkpoint of step 9"),
        (["export", "root", "out", "--dtype", "int3"], ConfigError.exit_code, "cannot be cast"),
        (["export", "root", "out", "--tokenizer", "empty"], ConfigError.exit_code, "holds no tokenizer"),
        (["sideways"], ConfigError.exit_code, "No such command 'sideways'"),
        (["import", "hf"], ConfigError.exit_code, "Missing argument 'ROOT'"),
    ],
)
def test_bad_words_are_one_error(words: list[str], code: int, said: str, tmp_path: Path, capfd: Any) -> None:
    folder = write_hub(tmp_path / "hf", MODELS["llama"])
    (tmp_path / "empty").mkdir()
    assert main(["hub", "import", str(folder), str(tmp_path / "root")]) == 0
    places = {name: str(tmp_path / name) for name in ("nowhere", "root", "out", "empty", "hf")}
    assert main(["hub", *(places.get(word, word) for word in words)]) == code
    assert said in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("kind", "key", "value"), [
    ("mistral", "sliding_window", 4096), ("mistral", "num_key_value_heads", 8), ("mixtral", "sliding_window", 0),
    ("qwen3", "head_dim", 128), ("llama", "max_position_embeddings", 2048), ("qwen2", "num_key_value_heads", 32),
])  # fmt: skip
def test_a_key_that_is_not_there_has_the_value_of_its_family(kind: str, key: str, value: int) -> None:
    config = to_hub(MODELS[kind], 32, "float32") | {"num_attention_heads": 32, "hidden_size": 64}
    config.pop(key)
    names = {"sliding_window": "window", "num_key_value_heads": "kv_heads", "max_position_embeddings": "context"}
    assert getattr(from_hub(config, ""), names.get(key, key)) == value


@pytest.mark.parametrize(("name", "shape", "is_taken"), [
    ("model.layers.0.self_attn.q_proj.bias", (16,), False), ("model.layers.2.input_layernorm.weight", (16,), False),
    ("score.weight", (1, 16), False), ("model.layers.0.self_attn.rotary_emb.inv_freq", (2,), True),
])  # fmt: skip
def test_tensors_that_the_model_does_not_have_are_refused_by_name(
    name: str, shape: tuple[int, ...], is_taken: bool, tmp_path: Path
) -> None:
    folder = write_hub(tmp_path / "hf", MODELS["llama"])
    save_file({name: torch.ones(shape)}, folder / "model-more.safetensors")
    if is_taken:
        assert name not in {tensor.theirs for parts in HubFolder(folder).parts.values() for tensor, _ in parts}
        return
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        HubFolder(folder)


@pytest.mark.parametrize("is_equal", [True, False])
def test_a_head_beside_a_tied_embedding_is_equal_to_it_or_refused(is_equal: bool, tmp_path: Path) -> None:
    folder = write_hub(tmp_path / "hf", MODELS["qwen2"])
    embedding = tensors_in(folder)["model.embed_tokens.weight"]
    save_file({"lm_head.weight": embedding if is_equal else embedding + 1}, folder / "model-more.safetensors")
    if is_equal:
        HubFolder(folder)
        return
    with pytest.raises(ConfigError, match=r"lm_head\.weight equal to the embedding"):
        HubFolder(folder)


def test_a_folder_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    folder = write_hub(tmp_path / "hf", MODELS["mixtral"])
    _, second = sorted(folder.glob("*.safetensors"))
    second.rename(tmp_path / "aside")
    with pytest.raises(ConfigError, match="does not hold the model"):
        HubFolder(folder)
    second.write_bytes((tmp_path / "aside").read_bytes()[:-5])
    with pytest.raises(DamagedError, match="is damaged"):
        HubFolder(folder)


def test_a_checkpoint_of_something_else_is_no_model(tmp_path: Path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "w.safetensors")
    store = open_store(str(tmp_path / "root"))
    place = direct_writer.begin(store, 1, world_size=1)
    rows = [
        direct_writer.StreamedRow(shard=one.shard("w"), read=one.read)
        for one in st.read_file(tmp_path / "w.safetensors")
    ]
    direct_writer.write(store, place, 0, rows, {}, job="import")
    direct_writer.finish(store, place)
    with pytest.raises(ConfigError, match="no checkpoint of this trainer"):
        CheckpointWeights(str(tmp_path / "root"))


# -- boxes


@pytest.mark.parametrize("kind", ["folder", "root"])
@pytest.mark.parametrize("row_bytes", [1, 1 << 20], ids=["columns", "rows"])
def test_any_box_is_read(kind: str, row_bytes: int, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("flashckpt.trainer.hub.source._ROW_BYTES", row_bytes)
    folder = write_hub(tmp_path / "hf", MODELS["qwen2_moe"])
    main(["hub", "import", str(folder), str(tmp_path / "root")])
    whole = Transformer(MODELS["qwen2_moe"], 16)
    weights.load([whole], HubFolder(folder))
    source = open_weights(str(folder if kind == "folder" else tmp_path / "root"))
    generator = torch.Generator().manual_seed(2)
    for name, parameter in whole.named_parameters():
        for _ in range(3):
            ends = [sorted(torch.randint(0, n + 1, (2,), generator=generator).tolist()) for n in parameter.shape]
            lengths = [max(1, stop - start) for start, stop in ends]
            offsets = [min(start, n - 1) for (start, _), n in zip(ends, parameter.shape, strict=True)]
            raw = np.asarray(source.read(name, offsets, lengths)).view(np.float32).reshape(lengths)
            wanted = parameter.detach()[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
            assert np.array_equal(raw, wanted.numpy()), name


def test_ranks_read_what_they_hold(tmp_path: Path, monkeypatch: Any) -> None:
    folder, read, counts = write_hub(tmp_path / "hf", MODELS["mixtral"]), st.Incoming.read, [0]

    def counting(self: Any, start: int, stop: int) -> memoryview:
        counts[0] += stop - start
        return read(self, start, stop)

    monkeypatch.setattr(st.Incoming, "read", counting)
    source = HubFolder(folder)
    source.read("layers.0.feed_forward.experts.w1", (2, 0, 0), (1, 24, 16))
    source.read("layers.0.attention.wq.weight", (4, 0), (4, 16))
    assert counts[0] == 4 * (24 * 16 + 4 * 16)


# -- [init] from


def digests(folder: Path, source: list[str], world: int, parallel: Any, **sections: Any) -> Any:
    batch = {"global_batch": 8, "micro_batch": 2}
    config = run_config(folder, parallel=parallel, train=batch, data={"source": source}, **sections)
    return values(run_ranks(train_rank, world, to_values(config), 2, timeout_s=100))


@pytest.mark.matrix
def test_a_run_begins_with_the_weights_it_is_given_in_any_layout(tmp_path: Path) -> None:
    model = {
        name: getattr(MODELS["qwen2"], name)
        for name in (*SMALL, "qkv_bias", "tied_embeddings", "window", "window_from")
    }
    folder, text = write_hub(tmp_path / "hf", MODELS["qwen2"], torch.bfloat16), write_corpus(tmp_path / "text")
    main(["hub", "import", str(folder), str(tmp_path / "root")])
    drawn = digests(tmp_path, text, 1, {}, model=model)[0]
    given, imported = (
        digests(tmp_path, text, 1, {}, model=model, init={"from": str(tmp_path / name)})[0] for name in ("hf", "root")
    )
    assert given == imported
    assert given["losses"] != drawn["losses"]
    for rank in digests(tmp_path, text, 4, {"pp": 2, "tp": 2}, model=model, init={"from": str(folder)}):
        mine, wanted = ([float.fromhex(loss) for loss in one["losses"]] for one in (rank, given))
        assert mine == pytest.approx(wanted, abs=1e-4)


def test_the_model_is_that_of_the_weights(tmp_path: Path) -> None:
    folder = write_hub(tmp_path / "hf", MODELS["qwen3"])
    config = from_values({"init": {"from": str(folder)}})
    assert with_model_of_weights(config).model == HubFolder(folder).model
    named = replace(config, model=MODELS["qwen3"])
    assert with_model_of_weights(named).model == MODELS["qwen3"]
    with pytest.raises(ConfigError, match=r"another model: model\.ffn, model\.rope_base\n"):
        with_model_of_weights(replace(named, model=replace(MODELS["qwen3"], ffn=32, rope_base=5e5)))
    gone = replace(config.init, from_=str(tmp_path / "gone"))
    with pytest.raises(FlashckptError):
        with_model_of_weights(replace(config, init=gone))
    assert with_model_of_weights(replace(named, init=gone)).model == MODELS["qwen3"]  # a resume has no need of it


def test_weights_of_another_model_are_refused_before_torch_is_imported(tmp_path: Path) -> None:
    folder = write_hub(tmp_path / "hf", MODELS["llama"])
    code = (
        "import sys; from flashckpt.trainer.__main__ import main; "
        f"code = main(['--init.from', {str(folder)!r}, '--model.dim', '128']); "
        "sys.exit(99 if 'torch' in sys.modules else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == ConfigError.exit_code, done.stderr
    assert "weights of another model: model.dim" in done.stderr


def test_the_settings_of_init_survive_toml() -> None:
    assert to_values(from_values({"init": {"from": "x"}}))["init"] == {"from": "x"}
    assert to_values(RunConfig())["init"] == {"from": ""}
    with pytest.raises(ConfigError, match=r"init\.frm"):
        from_values({"init": {"frm": "x"}})


def test_each_family_has_its_own_name_and_class() -> None:
    assert len({family.architecture for family in FAMILIES.values()}) == len(FAMILIES) == len(MODELS)
