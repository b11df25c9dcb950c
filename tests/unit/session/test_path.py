"""How far the way of the data is, in modules and calls: counts of `benchmarks/path.py`, which are not times."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from support.paths import ROOT

from flashckpt.native import implementation


@pytest.fixture(scope="module")
def path() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("path_of_the_data", ROOT / "benchmarks" / "path.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.skipif(implementation() == "python", reason="the counts are those with the C part")
@pytest.mark.parametrize(
    ("way", "modules", "calls"), [("step with a snapshot", 33, 350), ("warm restore of 0.1 MB", 87, 2550)]
)
def test_the_way_of_the_data_does_not_get_longer(
    path: ModuleType, tmp_path: Path, way: str, modules: int, calls: int
) -> None:
    trace = path.PATHS[way](tmp_path / "root")
    assert len(trace.modules) <= modules, sorted(trace.modules)
    assert trace.modules.total() <= calls, trace.functions.most_common(20)
    assert len(trace.modules) > modules // 2, "the trace no longer sees the product"
