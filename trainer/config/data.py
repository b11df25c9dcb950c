"""What a run reads: its sources and how their documents become tokens. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flashckpt.errors import ConfigError

TEXT_KINDS = ("text", "jsonl", "parquet", "datasets", "stdlib")
"""Kinds that `data prepare` tokenises."""
TOKEN_KINDS = ("tokens", "megatron")
"""Kinds that hold tokens already and are read where they are."""
DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceConfig:
    """One `[[data.sources]]`.

    Attributes:
        kind: One of TEXT_KINDS and TOKEN_KINDS.
        urls: Paths, patterns or fsspec URLs; for "megatron" prefixes without .bin, for "stdlib" code, doc or prose.
        channel: Name under which its loss is reported; sources of one channel are one data set of several parts.
        weight: Its share of the samples, an integer relative to the other sources.
        tokenizer: A tokenizer.json for this source instead of data.tokenizer.
        key: Member of a JSON object or column of a table that holds the text.
        dtype: "tokens": type of a token, little endian.
        end: "tokens": number of the token that ends a document; -1: the files know no documents.
        storage_options: For fsspec; not recorded.
    """

    kind: str = "text"
    urls: tuple[str, ...] = ()
    channel: str = "text"
    weight: int = 1
    tokenizer: str = ""
    key: str = "text"
    dtype: str = "uint16"
    end: int = -1
    storage_options: dict[str, Any] = field(default_factory=dict)

    @property
    def has_text(self) -> bool:
        """Whether its documents have to be tokenised first."""
        return self.kind in TEXT_KINDS


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """`source` and `holdout_every`: text as bytes without preparation; `sources`: everything else.

    Attributes:
        source: "stdlib", or file patterns of your own text; ignored where there are `sources`.
        folder: Where prepared tokens are.
        holdout_every: About one document (of token files: window) in so many is held out for evaluation.
        sources: `[[data.sources]]`.
        tokenizer: A tokenizer.json, or a folder with one; "": bytes.
        bpe: Train a byte-level BPE of so many tokens on the text of the sources; 0: do not.
        end_token: Name of the token after each document; "": the tokenizer's own.
        packing: "stream" cuts windows from documents one after another, "best-fit" fills each with whole documents.
        document_mask: Whether tokens see only their own document and positions begin again with it.
        read_ahead: Batches read beside the step; 0 reads them in the step.
    """

    source: tuple[str, ...] = ("stdlib",)
    folder: str = "data/stdlib"
    holdout_every: int = 20
    sources: tuple[SourceConfig, ...] = ()
    tokenizer: str = ""
    bpe: int = 0
    end_token: str = ""
    packing: str = "stream"
    document_mask: bool = True
    read_ahead: int = 2


def check_data(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Refuse a `[data]` table whose settings contradict each other.

    Raises:
        ConfigError: a setting without effect, an unknown kind, a source without URLs, a weight below 0.
    """
    if not values["sources"]:
        for key in ("tokenizer", "bpe", "end_token", "packing", "document_mask"):
            if values[key] != defaults[key]:
                raise _wrong(f"data.{key} has no effect", f"data.{key} = {values[key]!r}", "[[data.sources]]")
        return
    if values["source"] != defaults["source"]:
        raise _wrong("data.source and [[data.sources]] are both set", f"{values['source']}", "one of the two")
    if values["tokenizer"] and values["bpe"]:
        raise _wrong("data.tokenizer and data.bpe are both set", f"{values['tokenizer']!r}", "one of the two")
    if values["bpe"] and values["bpe"] < 257:
        raise _wrong(
            "data.bpe is too small", str(values["bpe"]), "257 or more: the bytes and a token between documents"
        )
    for number, source in enumerate(values["sources"]):
        check_source(f"data.sources[{number}]", source)
    if values["packing"] == "best-fit" and any(source["kind"] == "tokens" for source in values["sources"]):
        raise _wrong("token files cannot be packed", 'data.packing = "best-fit"', 'data.packing = "stream"')
    if not any(source["weight"] for source in values["sources"]):
        raise _wrong("no source has a weight", "data.sources.weight = 0", "1 or more for one of them")


def check_source(name: str, source: Mapping[str, Any]) -> None:
    """Refuse a source, called `name`, whose settings contradict each other.

    Raises:
        ConfigError: see `check_data`.
    """
    if source["kind"] not in TEXT_KINDS + TOKEN_KINDS:
        raise _wrong(f"{name}.kind is unknown", repr(source["kind"]), f"one of {', '.join(TEXT_KINDS + TOKEN_KINDS)}")
    if not source["urls"]:
        raise _wrong(f"{name} has no urls", "urls = []", 'urls = ["path, pattern or URL", ...]')
    if source["weight"] < 0:
        raise _wrong(f"{name}.weight is too small", str(source["weight"]), "0 or more")
    if source["dtype"] not in DTYPES:
        raise _wrong(f"{name}.dtype is unknown", repr(source["dtype"]), f"one of {', '.join(DTYPES)}")
    plain = SourceConfig()
    used = {"tokens": {"dtype", "end"}, "jsonl": {"key"}, "parquet": {"key"}, "datasets": {"key"}}
    for key in ("dtype", "end", "key"):
        if source[key] != getattr(plain, key) and key not in used.get(source["kind"], set()):
            raise _wrong(
                f"{name}.{key} has no effect", f"{key} = {source[key]!r}", f"another kind than {source['kind']!r}"
            )
    if source["tokenizer"] and source["kind"] in TOKEN_KINDS:
        raise _wrong(f"{name}.tokenizer has no effect", repr(source["tokenizer"]), "a kind that is text")


def _wrong(problem: str, found: str, expected: str) -> ConfigError:
    return ConfigError(
        problem, found=found, expected=expected, state="Nothing was started.", remedy="docs/trainer.md, Data"
    )
