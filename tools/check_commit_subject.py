#!/usr/bin/env python3
"""Check the subject line of a commit message: `check_commit_subject.py FILE`, as git's commit-msg hook calls it."""

from __future__ import annotations

import sys
from pathlib import Path

LIMIT = 72
"""Characters; a log of one line per commit shows no more in a terminal of 80 columns."""


def problem_of(message: str) -> str | None:
    """Return what is wrong with the subject of a commit message, or None."""
    lines = [line for line in message.splitlines() if not line.startswith("#")]
    subject = lines[0] if lines else ""
    if subject.startswith(("Merge ", "Revert ", "fixup! ", "squash! ")):
        return None
    if not subject.strip():
        return "the subject line is empty"
    if len(subject) > LIMIT:
        return (
            f"the subject line has {len(subject)} characters, expected at most {LIMIT}: move the reasons into the body"
        )
    if subject.endswith("."):
        return "the subject line ends with a full stop"
    if len(lines) > 1 and lines[1].strip():
        return "the line after the subject must be empty"
    return None


def main() -> int:
    """Print the problem of the message in the file named on the command line; 1 if there is one."""
    problem = problem_of(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if problem is not None:
        sys.stderr.write(f"commit message: {problem}\n")
    return int(problem is not None)


if __name__ == "__main__":
    sys.exit(main())
