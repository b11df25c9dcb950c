"""What a run is evaluated on: held-out text, named sets, probes. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flashckpt.errors import ConfigError
from flashckpt.trainer.config.data import SourceConfig, check_source

PROBES = ("probability", "pairs", "choice", "generate")
MATCHES = ("exact", "number", "choice")


@dataclass(frozen=True, kw_only=True, slots=True)
class SetConfig:
    """One `[[eval.sets]]`: text or tokens that are scored whole and never trained on.

    Attributes:
        name: What its scores are called.
        kind, urls, key, dtype, end, storage_options: As in `[[data.sources]]`.
        batches: Global batches that are scored, spread evenly over the set; 0: all of it.
    """

    name: str = ""
    kind: str = "text"
    urls: tuple[str, ...] = ()
    key: str = "text"
    dtype: str = "uint16"
    end: int = -1
    batches: int = 0
    storage_options: dict[str, Any] = field(default_factory=dict)

    def source(self) -> SourceConfig:
        """Return the set as a source of data, whose channel has the name of the set."""
        return SourceConfig(
            kind=self.kind,
            urls=self.urls,
            channel=self.name,
            key=self.key,
            dtype=self.dtype,
            end=self.end,
            storage_options=self.storage_options,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeConfig:
    """One `[[eval.probes]]`: a JSON Lines file of questions, answered by the likelihoods of texts or by what the model writes.

    Attributes:
        name: What its results are called.
        url: A path or fsspec URL.
        kind: One of PROBES.
        limit: Ask so many questions from the beginning; 0: all.
        storage_options: For fsspec; not recorded.
        shots, stop, max_tokens, match, labels, shuffle, none_of_others: Of kind "generate" alone, see docs/evaluation.md.
    """

    name: str = ""
    url: str = ""
    kind: str = "choice"
    limit: int = 0
    storage_options: dict[str, Any] = field(default_factory=dict)
    shots: int = 0
    stop: tuple[str, ...] = ("\n",)
    max_tokens: int = 32
    match: str = "exact"
    labels: str = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    shuffle: bool = False
    none_of_others: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """When a run is evaluated, and on what.

    Attributes:
        every: In steps; 0 switches it off.
        batches: Global batches per channel of the held-out text, spread evenly over it.
        held_out: Whether the held-out text of each channel is scored.
        start_token: Name of the token that begins each prompt of a probe; "": none, and the end token where a prompt is empty.
        sets: `[[eval.sets]]`.
        probes: `[[eval.probes]]`.
    """

    every: int = 0
    batches: int = 2
    held_out: bool = True
    start_token: str = ""
    sets: tuple[SetConfig, ...] = ()
    probes: tuple[ProbeConfig, ...] = ()


def check_eval(values: Mapping[str, Any]) -> None:
    """Refuse an `[eval]` table whose settings contradict each other or would have no effect.

    Raises:
        ConfigError: a name is missing or used twice, an unknown kind, no file; or there is nothing to evaluate.
    """
    _check_names(values)
    _check_tables(values)
    if values["start_token"] and not values["probes"]:
        raise _wrong("eval.start_token has no effect", f"start_token = {values['start_token']!r}", "[[eval.probes]]")
    if not values["every"] and (values["sets"] or values["probes"] or not values["held_out"]):
        raise _wrong("[eval] would have no effect in this run", "eval.every = 0", "1 or more, or --evaluate")
    if not (values["held_out"] or values["sets"] or values["probes"]):
        raise _wrong("there is nothing to evaluate", "eval.held_out = false", "[[eval.sets]] or [[eval.probes]]")


def _check_names(values: Mapping[str, Any]) -> None:
    for part, first in (("sets", "urls"), ("probes", "url")):
        names = [one["name"] for one in values[part]]
        for number, one in enumerate(values[part]):
            where = f"eval.{part}[{number}]"
            if not one["name"] or names.index(one["name"]) != number:
                raise _wrong(f"{where} needs another name", f"name = {one['name']!r}", "a name that no other has")
            if not one[first]:
                raise _wrong(f"{where} has no {first}", f"{first} = {one[first]!r}", "a path or URL")


def _check_tables(values: Mapping[str, Any]) -> None:
    for number, one in enumerate(values["sets"]):
        shared = {key: value for key, value in one.items() if key not in ("name", "batches")}
        check_source(f"eval.sets[{number}]", {**shared, "weight": 1, "tokenizer": ""})
        _check_count(f"eval.sets[{number}].batches", one["batches"])
    for number, one in enumerate(values["probes"]):
        if one["kind"] not in PROBES:
            raise _wrong(f"eval.probes[{number}].kind is unknown", repr(one["kind"]), f"one of {', '.join(PROBES)}")
        _check_count(f"eval.probes[{number}].limit", one["limit"])
        _check_generation(f"eval.probes[{number}]", one)


def _check_generation(name: str, one: Mapping[str, Any]) -> None:
    plain = ProbeConfig()
    for key in ("shots", "stop", "max_tokens", "match", "labels", "shuffle", "none_of_others"):
        default = getattr(plain, key)
        if one["kind"] != "generate" and one[key] != (list(default) if isinstance(default, tuple) else default):
            raise _wrong(f"{name}.{key} has no effect", f"kind = {one['kind']!r}", 'kind = "generate"')
    _check_count(f"{name}.shots", one["shots"])
    if one["max_tokens"] < 1:
        raise _wrong(f"{name}.max_tokens is too small", str(one["max_tokens"]), "1 or more")
    if one["match"] not in MATCHES:
        raise _wrong(f"{name}.match is unknown", repr(one["match"]), f"one of {', '.join(MATCHES)}")
    if not all(one["stop"]):
        raise _wrong(f"{name}.stop holds an empty text", repr(one["stop"]), "texts that end an answer")
    if len(one["labels"]) < 2 or len(set(one["labels"])) < len(one["labels"]) or " " in one["labels"]:
        raise _wrong(f"{name}.labels cannot name options", repr(one["labels"]), "two or more different characters")


def _check_count(name: str, value: int) -> None:
    if value < 0:
        raise _wrong(f"{name} is too small", str(value), "0 or more")


def _wrong(problem: str, found: str, expected: str) -> ConfigError:
    return ConfigError(
        problem, found=found, expected=expected, state="Nothing was started.", remedy="docs/evaluation.md"
    )
