"""The configuration of a run: read, checked, compared.

In: TOML, words of a command line, recorded values. Out: frozen dataclasses, or an error that names the setting.
No torch.
"""

from flashckpt.trainer.config.run import (
    GuardConfig,
    RunConfig,
    TrainConfig,
    from_values,
    read_config,
    to_toml,
    to_values,
    without_secrets,
)

__all__ = [
    "GuardConfig",
    "RunConfig",
    "TrainConfig",
    "from_values",
    "read_config",
    "to_toml",
    "to_values",
    "without_secrets",
]
