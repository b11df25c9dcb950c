"""`[init] from`: the model and the first weights of a run are those of a folder or a root. Torch is imported late."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from flashckpt.errors import ConfigError, FlashckptError
from flashckpt.trainer.config import RunConfig, from_values, to_values
from flashckpt.trainer.config.model import ModelConfig
from flashckpt.trainer.hub.root_alone import is_root_alone, of_root_alone
from flashckpt.trainer.hub.source import open_weights

if TYPE_CHECKING:
    from torch import nn

_FREE = ("family", "context", "dropout", "router_aux_loss", "router_z_loss", "router_bias_rate")
"""Settings that change no weight, or as the rate of a bias add one that begins at 0."""


def with_model_of_weights(config: RunConfig, *, is_evaluated: bool = False, step: str | None = None) -> RunConfig:
    """Return the run with the model of `init.from`, if it names none itself; a model that is named has to be that one.

    Weights that cannot be read are no error for a run that names its model: it may have no need of them any more.

    Of a run that `is_evaluated`, not trained, a root alone is enough (`of_root_alone`).

    Raises:
        ConfigError: The two differ, or there is no model at `init.from`.
    """
    if is_evaluated and is_root_alone(config):
        return of_root_alone(config, step)
    if not config.init.from_:
        return config
    try:
        source = open_weights(config.init.from_, config.checkpoint.storage_options)
    except FlashckptError:
        if config.model == ModelConfig():
            raise
        return config
    source.close()
    if replace(config.model, dropout=0.0) == ModelConfig():
        found = replace(config, model=replace(source.model, dropout=config.model.dropout))
        return from_values(to_values(found))
    refuse_other_model(config.model, source.model, source.where)
    return config


def load_first_weights(config: RunConfig, parts: Sequence[nn.Module]) -> None:
    """Fill the parts of a model, as this rank holds them, from `init.from`.

    Raises:
        ConfigError: There is no model, or another one.
        DamagedError, ShardGapError: Bytes are missing or damaged.
    """
    from flashckpt.trainer.hub.weights import load

    source = open_weights(config.init.from_, config.checkpoint.storage_options)
    try:
        refuse_other_model(config.model, source.model, source.where)
        load(parts, source)
    finally:
        source.close()


def refuse_other_model(mine: ModelConfig, theirs: ModelConfig, where: str) -> None:
    """Raise ConfigError if weights at `where` are those of another model."""
    names = [field.name for field in dataclasses.fields(ModelConfig) if field.name not in _FREE]
    differing = [name for name in names if getattr(mine, name) != getattr(theirs, name)]
    if mine.head_size == theirs.head_size and "head_dim" in differing:
        differing.remove("head_dim")
    if theirs.router_bias_rate and not mine.router_bias_rate:
        differing.append("router_bias_rate")  # their tokens would go to other experts than in training
    if differing:
        raise ConfigError(
            f"{where} holds weights of another model: {', '.join(f'model.{name}' for name in differing)}",
            found=", ".join(f"model.{name} = {getattr(mine, name)}" for name in differing),
            expected=", ".join(f"model.{name} = {getattr(theirs, name)}" for name in differing),
            state="Nothing was started.",
            remedy="leave [model] out: it is read from there",
        )
