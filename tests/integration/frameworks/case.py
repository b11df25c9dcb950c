"""What a case is: a function that builds a training program, its name, and what is to become of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass(frozen=True, kw_only=True)
class Program:
    """A training program as a user writes it.

    Attributes:
        train: Trains one step, given its number (the first is 1), and returns the loss.
        tracked: What is given to `track()`, by name.
        options: Other arguments of `track()`, e.g. `mesh`.
    """

    train: Callable[[int], float]
    tracked: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a program knows when it starts.

    Attributes:
        restarted: Whether it was started again after a kill: a user's script that grows the model in the
            middle of a run is then called with the grown one.
        rank: Of the process group, where the case has one.
    """

    restarted: bool
    rank: int


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of the table.

    Attributes:
        group: Heading in the table.
        name: Unique.
        build: Makes the program, with the weights that the generators' seed gives.
        refused: Part of the message with which it is refused; "" where it is restored exactly.
        needs: Modules beyond torch that must be importable; their distributions' versions are in the table.
        world: Ranks; with more than one there is a gloo group.
        quick: Whether `make test` runs it.
        from_rank_0: Part of the names of state that every rank may take from rank 0, since the next step does so anyway.
        known: What is wrong today, in words for the reader of the table; "" where the outcome is the promised one.
        note: What the reader of the table should know.
    """

    group: str
    name: str
    build: Callable[[Start], Program]
    refused: str = ""
    needs: tuple[str, ...] = ()
    world: int = 1
    quick: bool = False
    from_rank_0: str = ""
    known: str = ""
    note: str = ""

    @property
    def promised(self) -> str:
        """The outcome that its row in the table promises."""
        return "wrong" if self.known else "refused" if self.refused else "exact"


REGISTRY: dict[str, Case] = {}


def case(group: str, name: str, **facts: Any) -> Callable[[Callable[[Start], Program]], Callable[[Start], Program]]:
    """Enter a function that builds a program into the matrix.

    Args:
        group: As in `Case`.
        name: As in `Case`.
        **facts: The other attributes of `Case`.
    """

    def enter(build: Callable[[Start], Program]) -> Callable[[Start], Program]:
        assert name not in REGISTRY, f"two cases are called {name!r}"
        REGISTRY[name] = Case(group=group, name=name, build=build, **facts)
        return build

    return enter


def net(width: int, *, bias: bool = True) -> nn.Sequential:
    """Return two layers with dropout between them, so that the generators are part of what is compared."""
    return nn.Sequential(
        nn.Linear(width, width, bias=bias), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, width, bias=bias)
    )
