"""The suite under every supported Python that is installed: `make test-pythons`. Missing ones are skipped, and said.

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
