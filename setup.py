"""The C part: optional, so that an installation without a compiler works and runs the Python implementation.

One build serves every Python from 3.10 on (limited API); free-threaded ones have no such API and do without.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

from setuptools import Extension, setup

FOLDER = Path("flashckpt/native")
HAS_LIMITED_API = not sysconfig.get_config_var("Py_GIL_DISABLED")

native = Extension(
    "flashckpt.native._copy",
    sources=sorted(str(path) for path in FOLDER.glob("*.c")),
    depends=sorted(str(path) for path in FOLDER.glob("*.h")),
    define_macros=[("Py_LIMITED_API", "0x030A0000")],
    extra_compile_args=["-std=c11", "-O3", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wshadow"],
    py_limited_api=True,
    optional=True,
)

setup(
    ext_modules=[native] if HAS_LIMITED_API else [],
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if HAS_LIMITED_API else {},
)
