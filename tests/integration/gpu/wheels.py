"""The wheels that a machine with a GPU may lack: fetched here by their pins, unpacked there without pip or a network.

    python tests/integration/gpu/wheels.py fetch .gpu-wheels              # make gpu-wheels
    python3 tests/integration/gpu/wheels.py unpack .gpu-wheels FOLDER     # gpu.sh does it: only what is missing there

For Python 3.12 on x86-64; torch, and what torch itself asks for, are the machine's own.
"""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
LIMIT_BYTES = 60 << 20
NATIVE = ROOT / "flashckpt" / "native" / "_copy.abi3.so"
"""The C part: one build serves every Python from 3.10 on."""
NEEDED = {
    "numpy": "numpy",
    "fsspec": "fsspec",
    "zstandard": "zstandard",
    "msgpack": "msgpack",
    "watchdog": "watchdog",
    "xxhash": "xxhash",
    "click": "click",
    "rich": "rich",
    "markdown-it-py": "markdown_it",
    "mdurl": "mdurl",
    "Pygments": "pygments",
    "prometheus_client": "prometheus_client",
    "pytest": "pytest",
    "pytest-timeout": "pytest_timeout",
    "pluggy": "pluggy",
    "iniconfig": "iniconfig",
    "packaging": "packaging",
    "hypothesis": "hypothesis",
    "sortedcontainers": "sortedcontainers",
}
"""What this project and its tests import (distribution: module), s3fs and other clients of storage left out."""
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17, 12, 5)] + [
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
]


def pins() -> dict[str, str]:
    """Return `name==version` by name, for what is needed."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0].lower(): line for line in lines if "==" in line}
    return {name: pinned[name.lower()] for name in NEEDED}


def fetch(folder: Path) -> int:
    """Download one wheel per pin into `folder` and list them; 1 where they are too many bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", "3.12", "--implementation", "cp", "--dest", str(folder)]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    wanted = pins()
    for pin in wanted.values():
        if not wheels_of(folder, pin):
            subprocess.run([*command, pin], check=True)
    total = 0
    for name, pin in wanted.items():
        (wheel,) = wheels_of(folder, pin)
        total += wheel.stat().st_size
        print(f"{wheel.stat().st_size / 1e6:8.2f} MB  {wheel.name}  ({name})")
    if NATIVE.exists():
        shutil.copy2(NATIVE, folder)
        total += NATIVE.stat().st_size
        print(f"{NATIVE.stat().st_size / 1e6:8.2f} MB  {NATIVE.name}  (the C part of this tree)")
    else:
        print(f"{NATIVE.name} is not built here (no compiler?): copies will be made in Python there")
    print(f"{total / (1 << 20):8.2f} MiB in {len(wanted)} wheels; {LIMIT_BYTES >> 20} MiB are the limit")
    return 1 if total > LIMIT_BYTES else 0


def wheels_of(folder: Path, pin: str) -> list[Path]:
    """Return the wheels of `name==version` in the folder."""
    wanted = normal(pin.replace("==", "-"))
    return [path for path in folder.glob("*.whl") if normal("-".join(path.name.split("-")[:2])) == wanted]


def normal(name: str) -> str:
    """Return a name as the package index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def fits(wheel: Path) -> bool:
    """Whether this interpreter can import what a wheel holds."""
    python, abi, where = wheel.stem.split("-")[-3:]
    if where != "any" and platform.machine() not in where:
        return False
    newest = max((int(tag[3:]) for tag in python.split(".") if tag.startswith("cp3") and tag[3:].isdigit()), default=0)
    return newest == sys.version_info[1] or newest == 0 or (abi == "abi3" and newest <= sys.version_info[1])


def unpack(folder: Path, target: Path) -> int:
    """Unpack the wheels whose module this Python lacks; 1, and their names, where some are missing in the folder too."""
    target.mkdir(parents=True, exist_ok=True)
    missing = []
    for name, pin in pins().items():
        if importlib.util.find_spec(NEEDED[name]) is not None:
            continue
        found = [wheel for wheel in wheels_of(folder, pin) if fits(wheel)]
        if not found:
            missing.append(pin)
            continue
        with zipfile.ZipFile(found[0]) as wheel:
            wheel.extractall(target)
    if missing:
        here = f"Python {sys.version_info[0]}.{sys.version_info[1]} on {platform.machine()}"
        print(
            f"gpu: {here} lacks {', '.join(missing)}, and {folder} has no wheel of them for it;"
            " make gpu-wheels fetches those for Python 3.12 on x86_64",
            file=sys.stderr,
        )
    return 1 if missing else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["fetch"] and len(sys.argv) == 3:
        sys.exit(fetch(Path(sys.argv[2])))
    if sys.argv[1:2] == ["unpack"] and len(sys.argv) == 4:
        sys.exit(unpack(Path(sys.argv[2]), Path(sys.argv[3])))
    sys.exit(__doc__)
