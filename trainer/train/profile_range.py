"""`--profile FROM:TO` and `--profile-phases N`. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from flashckpt.errors import ConfigError

MOST_STEPS = 100
"""A profile holds each operator of each rank in memory until it is written."""
WARM_STEPS = 3
"""The first steps of a process are slower than all others: their phases are not profiled."""


@dataclass(frozen=True, slots=True)
class ProfileRange:
    """Steps that are profiled: from `first` up to, not including, `end`."""

    first: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Profiled:
    """What is measured of a run beside training it.

    Attributes:
        steps: Steps that are traced; None: none are.
        phases: So many steps, of which every rank waits for all others at the end of each phase; 0: none do.
    """

    steps: ProfileRange | None = None
    phases: int = 0

    def __bool__(self) -> bool:
        return self.steps is not None or self.phases > 0


NOTHING = Profiled()


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


def phase_steps(text: str | None, steps: int) -> int:
    """Return the number of `--profile-phases`; 0 without.

    Args:
        text: "20" for 20 steps as they are, and 20 more that are synchronised.
        steps: Of the run.

    Raises:
        ConfigError: It is no number, or the run is too short.
    """
    if text is None:
        return 0
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    if not 1 <= number <= MOST_STEPS or WARM_STEPS + 2 * number > steps:
        raise ConfigError(
            "--profile-phases is not a number of steps of the run",
            found=f"{text!r}, and train.steps = {steps}",
            expected=f"1 to {MOST_STEPS}, and train.steps of at least {WARM_STEPS} and twice as many",
            state="Nothing was started.",
        )
    return number
