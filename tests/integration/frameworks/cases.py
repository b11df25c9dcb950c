"""The whole matrix, in the order of the table; importing it imports no module beyond torch."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util

from integration.frameworks import dtypes, modules, objects, optimizers, third_party, wrappers
from integration.frameworks.case import REGISTRY, Case

MODULES = (optimizers, modules, dtypes, objects, wrappers, third_party)
CASES: dict[str, Case] = REGISTRY
DISTRIBUTIONS = {"lion_pytorch": "lion-pytorch"}
"""Distribution of a module where it has another name."""


def missing(case: Case) -> list[str]:
    """Return the modules that a case needs and this environment lacks."""
    return [name for name in case.needs if importlib.util.find_spec(name) is None]


def version(name: str) -> str:
    """Return the version of the distribution of a module."""
    return importlib.metadata.version(DISTRIBUTIONS.get(name, name))


def warm(case: Case) -> None:
    """Import once what every life of a case would import."""
    import torch._dynamo

    assert torch._dynamo is not None  # the first use of an optimizer imports it
    for name in case.needs:
        importlib.import_module(name)
