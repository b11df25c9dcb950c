"""In every interpreter of the programs: torchvision from PyPI beside a torch for CPUs, where its compiled operators do not load."""

from __future__ import annotations

import importlib.abc
import sys
from typing import Any

KEPT: list[Any] = []
"""The definitions: they end with their library."""


class BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Defines the operators whose absence ends the import, once, when torchvision is looked for."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Find nothing: the finders behind this one do."""
        if name == "torchvision":
            sys.meta_path.remove(self)
            from torch.library import Library

            KEPT.append(Library("torchvision", "FRAGMENT"))  # type: ignore[no-untyped-call]
            for operator in ("nms", "qnms"):
                KEPT[0].define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, BeforeTorchvision())
