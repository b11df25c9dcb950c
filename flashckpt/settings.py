"""The settings of a Checkpointer, checked once. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flashckpt.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """As the arguments of `Checkpointer`, with root and job resolved."""

    root: str
    job: str
    snapshot_every: int = 5
    persist_every: int = 250
    keep_last: int | None = 3
    keep_every: int | None = None
    slots: int | str = "auto"
    storage_options: dict[str, Any] = field(default_factory=dict)
    compression: str = "off"

    def __post_init__(self) -> None:
        for name in ("snapshot_every", "persist_every"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} is wrong", found=repr(value), expected="a number of steps, at least 1")
        if self.slots != "auto" and (type(self.slots) is not int or not 2 <= self.slots <= 64):
            raise ConfigError("slots is wrong", found=repr(self.slots), expected='"auto" or 2 to 64')

    @property
    def slot_count(self) -> int | None:
        """The number of slots the user asked for, or None."""
        return None if self.slots == "auto" else int(self.slots)

    def is_due(self, step: int) -> bool:
        """Whether a snapshot is taken at `step`."""
        return step % self.snapshot_every == 0 or self.is_persist(step)

    def is_persist(self, step: int) -> bool:
        """Whether the snapshot of `step` is to be persisted."""
        return step % self.persist_every == 0
