"""`--profile FROM:TO`. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from flashckpt.errors import ConfigError

MOST_STEPS = 100
"""A profile holds each operator of each rank in memory until it is written."""


@dataclass(frozen=True, slots=True)
class ProfileRange:
    """Steps that are profiled: from `first` up to, not including, `end`."""

    first: int
    end: int


def profile_range(text: str | None, steps: int) -> ProfileRange | None:
    """Return the range of `--profile`; None without.

    Args:
        text: "100:105" for steps 100 to 104.
        steps: Of the run.

    Raises:
        ConfigError: It is no range of steps of the run, or too long.
    """
    if text is None:
        return None
    first, _, end = text.partition(":")
    numbers = [int(part) if part.isascii() and part.isdigit() and len(part) < 10 else -1 for part in (first, end)]
    if not 1 <= numbers[0] < numbers[1] <= steps + 1 or numbers[1] - numbers[0] > MOST_STEPS:
        raise ConfigError(
            "--profile is not a range of steps",
            found=repr(text),
            expected=f"FROM:TO, such as 100:105 for steps 100 to 104; at most {MOST_STEPS} of 1 to {steps}",
            state="Nothing was started.",
        )
    return ProfileRange(*numbers)
