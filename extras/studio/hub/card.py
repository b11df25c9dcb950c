"""The model card of an export: what its checkpoint says of the run. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashckpt.printable import printable
from flashckpt.trainer.hub.source import AVERAGE, RECORD, CheckpointWeights
from flashckpt.trainer.model.flops import count_parameters, flops_per_token

CARD = "README.md"


def card(source: CheckpointWeights, values: Mapping[str, Any], has_tokenizer: bool) -> bytes:
    """Return README.md as the Hugging Face hub shows it: no licence and no claim, which are the author's to write.

    Args:
        source: The checkpoint.
        values: The config.json of the export.
        has_tokenizer: Whether a tokenizer is in the folder.
    """
    manifest, model = source.source.manifest, source.model
    tokens = int(manifest.values[RECORD].get("tokens", 0))
    rows = [("parameters", f"{count_parameters(model):,}"), ("architecture", values["architectures"][0])]
    rows += [("context", f"{values['max_position_embeddings']:,} tokens"), ("vocabulary", f"{model.vocab:,} tokens")]
    rows += [("step", f"{manifest.step:,}" + (", average of the weights" if source.label == AVERAGE else ""))]
    if tokens:
        flops = tokens * flops_per_token(model, source.run.train.seq_len)
        rows += [("trained on", f"{tokens:,} tokens"), ("training compute", f"{flops:.3g} FLOPs")]
    rows += [(name, text) for name, text in _settings(source.recorded).items() if text]
    if not has_tokenizer:
        rows.append(("tokenizer", "not in this folder"))
    table = "\n".join(f"| {name} | {printable(text).replace('|', '/')} |" for name, text in rows)
    kind = str(values["model_type"])
    return (
        f"---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- {kind}\n---\n\n"
        f"# {kind}, {count_parameters(model):,} parameters\n\n| | |\n|---|---|\n{table}\n"
    ).encode()


def _settings(recorded: Mapping[str, Any]) -> dict[str, str]:
    def section(name: str) -> Mapping[str, Any]:
        found = recorded.get(name)
        return found if isinstance(found, dict) else {}

    data, optim, train = section("data"), section("optim"), section("train")
    channels = dict.fromkeys(str(one.get("channel", "")) for one in data.get("sources") or [])
    return {
        "data": ", ".join(channels),
        "batch": f"{train['global_batch']} x {train['seq_len']} tokens" if "global_batch" in train else "",
        "optimizer": f"{optim['name']}, rate {optim['lr']:g}" if {"name", "lr"} <= optim.keys() else "",
        "precision": str(train.get("precision", "")),
        "started from": str(section("init").get("from", "")),
    }
