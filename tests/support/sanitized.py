"""Lets tests/unit/native/test_native.py run against another build of the C part: the one with sanitizers.

NATIVE_COPY_LIBRARY names its file. Import this before flashckpt.native.
"""

from __future__ import annotations

import importlib.util
import os
import sys

LIBRARY = os.environ.get("NATIVE_COPY_LIBRARY", "")


def clean_environment() -> dict[str, str]:
    """Return the environment for a child that does not load that build: nothing preloaded."""
    return {key: value for key, value in os.environ.items() if key not in ("LD_PRELOAD", "NATIVE_COPY_LIBRARY")}


if LIBRARY:
    name = "flashckpt.native._copy"
    assert name not in sys.modules, "another build is loaded already"
    spec = importlib.util.spec_from_file_location(name, LIBRARY)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)

from flashckpt.native import copying, levels  # noqa: E402 -- not before the other build is in place

assert not LIBRARY or copying.part is module, "the tests would run against the build of the package"
__all__ = ["LIBRARY", "clean_environment", "levels"]
