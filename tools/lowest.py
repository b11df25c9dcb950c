#!/usr/bin/env python3
"""Print the lowest version of each dependency that pyproject.toml allows, but torch's; with --check compare what is installed.

Those of the tools for tests and documentation have no bounds: constraints.txt pins them.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import version
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
EXTRAS = ("fast", "trainer", "data", "tokenizers")
_REQUIREMENT = re.compile(r"([A-Za-z0-9-]+)>=([0-9.]+)(?:,!=[0-9.]+)*(?:;.*)?")


def lowest() -> dict[str, str]:
    """Return the lowest version of each package; ends with a message where one has no bound."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    asked = [*project["dependencies"], *(one for name in EXTRAS for one in project["optional-dependencies"][name])]
    found = {text: _REQUIREMENT.fullmatch(text.replace(" ", "")) for text in asked}
    if bad := [text for text, match in found.items() if match is None]:
        sys.exit(f"{PROJECT.name}: {bad[0]} has no lower bound")
    return {match[1]: match[2] for match in found.values() if match and match[1] != "torch"}


def is_same(installed: str, wanted: str) -> bool:
    """Return whether two versions are equal: zeros at the end do not count."""
    one, other = (re.sub(r"(\.0)+$", "", text) for text in (installed, wanted))
    return one == other


def main() -> int:
    """Print, or compare; 1 where another version is found first."""
    wanted = lowest()
    if "--check" not in sys.argv:
        sys.stdout.write(" ".join(f"{name}=={text}" for name, text in wanted.items()) + "\n")
        return 0
    wrong = [f"{name} {version(name)}, not {text}" for name, text in wanted.items() if not is_same(version(name), text)]
    sys.stdout.write("".join(f"{line}\n" for line in wrong))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
