"""One TOML file = one run: read into frozen dataclasses, overridden by `--section.key value`.

Torch-free, so that a wrong file is refused before anything slow is imported.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import keyword
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from flashckpt.core.settings import Settings, checked
from flashckpt.errors import ConfigError
from flashckpt.storage.factory import job_id, root_url
from flashckpt.trainer.config.checks import check_values
from flashckpt.trainer.config.data import DataConfig, check_data
from flashckpt.trainer.config.eval import EvalConfig, check_eval
from flashckpt.trainer.config.log import LogConfig
from flashckpt.trainer.config.model import ModelConfig
from flashckpt.trainer.config.optim import EmaConfig, OptimConfig, check_optim
from flashckpt.trainer.config.parallel import ParallelConfig
from flashckpt.trainer.config.phase import PhasesConfig, as_table, check_phases
from flashckpt.trainer.config.sample import SampleConfig, check_samples

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Sizes of a step: `global_batch` and `micro_batch` count samples, `seq_len` tokens. `compile`: each block by torch.compile.

    `attention`: "sdpa", or on a GPU "flex"; "auto" chooses. `precision` "auto": bfloat16 on a GPU, else float32. `loss_chunk`: tokens whose
    logits exist at a time (0: all of a micro-batch). `tf32`: products of float32 matrices in TF32, on a GPU. `float8`: how
    linear layers of the blocks are scaled to it ("off", "tensorwise", "rowwise"); `float8_emulate`: on any device, slowly.
    """

    steps: int = 100
    seq_len: int = 64
    global_batch: int = 16
    micro_batch: int = 1
    seed: int = 1
    precision: str = "auto"
    tf32: bool = False
    float8: str = "off"
    float8_emulate: bool = False
    loss_chunk: int = 0
    attention: str = "auto"
    device: str = "auto"
    deterministic: bool = False
    compile: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class InitConfig:
    """First weights: `from` is a Hugging Face folder or a checkpoint root; empty draws them."""

    from_: str = ""  # keys that are words of Python end in an underscore here


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardConfig:
    """What to do about non-finite values and spikes. `window` in steps; as many accepted ones earn an intervention back.

    In median deviations: `spike_mads` of the loss, up or down; `norm_mads` of the gradient norm, up (0: never).
    """

    max_interventions: int = 4
    on_spike: str = "warn"
    window: int = 32
    spike_mads: float = 12.0
    norm_mads: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Everything that one run is."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    init: InitConfig = field(default_factory=InitConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: Settings = field(default_factory=Settings)
    guard: GuardConfig = field(default_factory=GuardConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    samples: SampleConfig = field(default_factory=SampleConfig)
    log: LogConfig = field(default_factory=LogConfig)
    phase: PhasesConfig = field(default_factory=PhasesConfig)


def read_config(
    path: str | os.PathLike[str] | None,
    overrides: Sequence[str] = (),
    *,
    recorded: Mapping[str, Mapping[str, Any]] | None = None,
) -> RunConfig:
    """Return the run that a TOML file and `--section.key value` words describe.

    Args:
        path: The file; None for the defaults.
        overrides: Command-line words, `--a.b value` or `--a.b=value`, applied last.
        recorded: What a run recorded of itself, in place of the defaults where there is no file.

    Raises:
        ConfigError: unreadable file, unknown key (the nearest name is given), wrong type or value.
    """
    values = _read_toml(Path(path)) if path else {name: dict(content) for name, content in (recorded or {}).items()}
    for key, text in split_overrides(overrides):
        section, _, name = key.partition(".")
        if not name:
            raise _unknown(key, [f"{s}.{n}" for s in _sections() for n in _fields(s)])
        _put(values.setdefault(section, {}), key, text)
    return from_values(values)


def _put(content: Any, key: str, text: str) -> None:
    """Set one key of a section from a command-line word; `section.table.name` sets one entry of a table."""
    section, _, name = key.partition(".")
    table, _, entry = name.partition(".")
    if not isinstance(content, dict):
        return  # not a table: from_values says so
    if entry and get_origin(_fields(section).get(table) if section in _sections() else None) is dict:
        entries = content.setdefault(table, {})
        if isinstance(entries, dict):
            entries[entry] = _plain(text)
    else:
        content[name] = _parse(key, text)


def from_values(values: Mapping[str, Any]) -> RunConfig:
    """Return the RunConfig of nested plain values (TOML, or the values stored with a checkpoint)."""
    values = as_table(values)
    for section, content in values.items():
        if section not in _sections():
            raise _unknown(section, list(_sections()))
        if not isinstance(content, Mapping):
            raise ConfigError(
                f"[{section}] is not a table", found=repr(content), expected=f"[{section}] with key = value"
            )
    config = RunConfig(**{section: _build(section, dict(content)) for section, content in values.items()})
    plain = to_values(config)
    check_values(plain, DEFAULTS)
    check_optim(plain, DEFAULTS)
    check_data(plain["data"], DEFAULTS["data"])
    check_eval(plain["eval"])
    check_samples(plain["samples"], DEFAULTS["samples"])
    check_phases(plain)
    _check_checkpoint(config.checkpoint)
    return config


def to_values(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Return nested plain values (msgpack and TOML types); `from_values` is the way back."""
    values = dataclasses.asdict(config) | {"checkpoint": config.checkpoint.plain()}
    return {
        section: {key.rstrip("_"): _without_tuples(value) for key, value in content.items()}
        for section, content in values.items()
    }


def _without_tuples(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_without_tuples(part) for part in value]
    return {name: _without_tuples(part) for name, part in value.items()} if isinstance(value, dict) else value


def to_toml(config: RunConfig) -> str:
    """Return the run as TOML text that `read_config` reads back to the same value."""
    lines: list[str] = []
    for section, content in to_values(config).items():
        lines += [f"[{section}]", *(f"{key} = {_literal(value)}" for key, value in content.items()), ""]
    return "\n".join(lines)


_SECRET = ("key", "secret", "token", "passw", "credential", "auth", "sas", "signature", "cookie", "connection_string")
"""Parts of the names of store options whose values are not shown."""
_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")


def without_secrets(config: RunConfig) -> RunConfig:
    """Return the run as it may be shown: values of store options that look like credentials are "***"."""
    data = replace(config.data, sources=tuple(map(_shown, config.data.sources)))
    evaluation = replace(
        config.eval, sets=tuple(map(_shown, config.eval.sets)), probes=tuple(map(_shown, config.eval.probes))
    )
    options = _masked(config.checkpoint.storage_options)
    return replace(config, checkpoint=replace(config.checkpoint, storage_options=options), data=data, eval=evaluation)


def _shown(table: Any) -> Any:
    """Return a dataclass with a place in storage as it may be shown."""
    places = {"storage_options", "urls", "url"} & {one.name for one in dataclasses.fields(table)}
    return replace(table, **{name: _masked(getattr(table, name)) for name in places})


def _masked(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: "***" if any(s in name.lower() for s in _SECRET) else _masked(v) for name, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_masked(part) for part in value)
    return _LOGIN.sub("***@", value) if isinstance(value, str) else value


def split_overrides(words: Sequence[str]) -> list[tuple[str, str]]:
    """Return (key, text) pairs of `--a.b value` and `--a.b=value` words."""
    pairs: list[tuple[str, str]] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise ConfigError(f"unexpected argument {word!r}", expected="--section.key value", remedy="see --help")
        key, equals, text = word[2:].partition("=")
        if not equals:
            if not rest:
                raise ConfigError(f"--{key} has no value", expected=f"--{key} VALUE")
            text = rest.pop(0)
        pairs.append((key.replace("-", "_"), text))
    return pairs


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(
            f"the configuration {path} cannot be read",
            found=error.strerror or str(error),
            remedy="give --config FILE.toml",
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"the configuration {path} is not TOML", found=str(error), expected="[section] and key = value"
        ) from error


def _sections() -> dict[str, type[Any]]:
    return dict(get_type_hints(RunConfig))


def _fields(section: str) -> dict[str, Any]:
    return {name.rstrip("_"): kind for name, kind in get_type_hints(_sections()[section]).items()}


def _build(section: str, content: dict[str, Any]) -> Any:
    return _filled(_sections()[section], section, content)


def _filled(kind: type[Any], where: str, content: Mapping[str, Any]) -> Any:
    types = {name.rstrip("_"): hint for name, hint in get_type_hints(kind).items()}
    for name in content:
        if name not in types:
            raise _unknown(f"{where}.{name}", [f"{where}.{known}" for known in types])
    values = {k: _coerce(f"{where}.{k}", types[k], v) for k, v in content.items()}
    if kind is Settings:
        values = {k: checked(k, v, called=f"{where}.{k}") for k, v in values.items()}
    return kind(**{f"{k}_" if keyword.iskeyword(k) else k: v for k, v in values.items()})


def _coerce(key: str, wanted: Any, value: Any) -> Any:
    if get_origin(wanted) is tuple:
        item = get_args(wanted)[0]
        parts = value if isinstance(value, list | tuple) else [value]
        return tuple(_coerce(key, item, part) for part in parts)
    if get_origin(wanted) is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{key} has the wrong type", found=repr(value), expected=f"a table: [{key}]")
        return dict(value)
    if dataclasses.is_dataclass(wanted):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{key} has the wrong type", found=repr(value), expected=f"tables: [[{key}]]")
        return _filled(wanted, key, value)  # type: ignore[arg-type]  # a class, as hints are
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(wanted, UnionType):  # Settings know what it may be
        return value
    if type(value) is not wanted:
        raise ConfigError(f"{key} has the wrong type", found=repr(value), expected=wanted.__name__)
    return value


def _plain(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:  # not quoted: a string
        return text


def _parse(key: str, text: str) -> Any:
    section, _, name = key.partition(".")
    if section not in _sections():
        raise _unknown(key, [f"{s}.{n}" for s in _sections() for n in _fields(s)])
    wanted = _fields(section).get(name)
    if wanted is None:
        raise _unknown(key, [f"{section}.{known}" for known in _fields(section)])
    if get_origin(wanted) is tuple and dataclasses.is_dataclass(get_args(wanted)[0]):
        raise ConfigError(f"--{key} sets tables", found=text, expected=f"[[{key}]] in the file of --config")
    if get_origin(wanted) is tuple:
        return [_scalar(key, get_args(wanted)[0], part) for part in text.split(",") if part]
    if get_origin(wanted) is dict:
        raise ConfigError(f"--{key} sets a table", found=text, expected=f"--{key}.NAME VALUE")
    return _plain(text) if isinstance(wanted, UnionType) else _scalar(key, wanted, text)


def _scalar(key: str, wanted: type[Any], text: str) -> Any:
    try:
        if wanted is bool:
            return {"true": True, "false": False, "1": True, "0": False}[text.lower()]
        return wanted(text)
    except (ValueError, KeyError) as error:
        raise ConfigError(f"--{key} has the wrong type", found=repr(text), expected=wanted.__name__) from error


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # what JSON escapes, TOML does too
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(name)} = {_literal(part)}" for name, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_literal(part) for part in value) + "]"
    return repr(value)


def _unknown(key: str, known: Sequence[str]) -> ConfigError:
    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if not nearest:  # the right name in the wrong section
        nearest = [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]][:1]
    return ConfigError(
        f"unknown setting {key!r}",
        found=key,
        expected=f"{nearest[0]} (the nearest name)" if nearest else f"one of {', '.join(known)}",
        state="Nothing was started.",
        remedy="correct the name; --print-config shows every setting with its value",
    )


def _check_checkpoint(config: Settings) -> None:
    if config.root:
        root_url(config.root)
    if config.job:
        job_id("", config.job)


DEFAULTS = to_values(RunConfig())
