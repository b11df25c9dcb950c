"""Tests under every supported Python that is installed. Missing ones are skipped, and named.

`make test-pythons` runs the suite, `make test-blocks` the tests of shared-memory blocks under the oldest and the newest.

torch comes first and by itself, by its exact version: whatever else is installed must not choose another build.
"""

from __future__ import annotations

import nox

PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
nox.options.error_on_missing_interpreters = False
nox.options.reuse_existing_virtualenvs = True


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """Run `make test`'s tests; arguments after `--` go to pytest."""
    with open("constraints.txt", encoding="utf-8") as constraints:
        torch = next(line.strip() for line in constraints if line.startswith("torch=="))
    session.install(torch)
    session.install("-e", ".[fast,trainer,data,test]")
    session.run("python", "-m", "pytest", "--workers", "2", *session.posargs)


@nox.session(python=[PYTHONS[0], PYTHONS[-1]])
def blocks(session: nox.Session) -> None:
    """Run the tests of shared-memory blocks, which need no torch: resource trackers differ between these two versions."""
    session.install("numpy", "msgpack", "xxhash", "tomli", "pytest", "pytest-timeout", "hypothesis")
    session.env["PYTHONPATH"] = "."
    session.run(
        "python", "-m", "pytest", "tests/unit/shm/test_block.py", "tests/unit/shm/test_segment.py", *session.posargs
    )
