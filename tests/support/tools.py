"""The programs under tools/, as modules."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from support.paths import ROOT


def load_tool(name: str) -> Any:
    """Return one of them."""
    spec = importlib.util.spec_from_file_location(f"tools_{name}", ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
