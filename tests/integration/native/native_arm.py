"""The NEON level of the native copy, in an emulator: `make test-native-arm`. A program without Python, compiled across."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from flashckpt.core.records import chunk_digests

ROOT = Path(__file__).resolve().parents[3]
COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
CASES = [
    *((n, 0, 0) for n in range(1, 2100)),
    *((n, a, b) for n in (5000, 40_000) for a in range(0, 64, 7) for b in range(64)),
    *(((1 << 20) + e, 3, 5) for e in (-65, -1, 0, 1, 1025)),
    ((4 << 20) - 1, 1, 2),
]


@pytest.mark.parametrize("tool", [COMPILER, EMULATOR])
def test_tools_are_there(tool: str) -> None:
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed (apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user)")


@pytest.mark.skipif(shutil.which(COMPILER) is None or shutil.which(EMULATOR) is None, reason="no tools, see above")
def test_digests_and_copies_are_the_same_on_arm(tmp_path: Path) -> None:
    program = tmp_path / "harness"
    sources = [ROOT / "tests/support/native_harness.c"]
    sources += [ROOT / f"flashckpt/native/{name}.c" for name in ("xxh3", "copy", "numbers", "fused", "check_rows")]
    flags = ["-std=c11", "-O3", "-Wall", "-Wextra", "-Werror", "-static"]
    subprocess.run([COMPILER, *flags, *map(str, sources), "-o", str(program)], check=True)
    listed = "".join(f"{n} {a} {b}\n" for n, a, b in CASES)
    done = subprocess.run([EMULATOR, str(program)], input=listed, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 2 * len(CASES)
    data = ((np.arange(4 << 20, dtype=np.uint32) * np.uint32(2654435761)) >> 24).astype(np.uint8)
    for number, line in enumerate(lines):
        level, *found = line.split()
        assert level == ("plain", "neon")[number % 2]
        assert list(map(int, found)) == chunk_digests(data[: CASES[number // 2][0]]).tolist(), CASES[number // 2]
