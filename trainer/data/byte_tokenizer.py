"""A tokenizer.json whose tokens are bytes: what a model of 256 tokens is exported with. Pure."""

from __future__ import annotations

import json
from typing import Any


def byte_tokenizer() -> dict[str, bytes]:
    """Return the files of a tokenizer that gives each byte of UTF-8 its own number, without special tokens."""
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {_character(byte): byte for byte in range(256)}, "merges": [],
        },
    }  # fmt: skip
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return {
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False).encode(),
        "tokenizer_config.json": json.dumps(settings, indent=2).encode(),
    }


def _character(byte: int) -> str:
    """Return the character that stands for a byte, as GPT-2 chose them: itself where it can be printed, else from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if byte in printable:
        return chr(byte)
    return chr(256 + sum(one not in printable for one in range(byte)))
