"""The diffs for programs of others: short, with little of theirs, each in the table and in the page."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.paths import ROOT

from integration.others.all_others import continues
from integration.others.programs import PROGRAMS

DIFFS = Path(__file__).parent / "diffs"
MOST = 20
CONTEXT = 2
"""Lines of theirs around a change: one before and one behind, with two where changes are near each other."""


def parts(name: str) -> list[list[str]]:
    """Return the hunks of a diff."""
    text = (DIFFS / f"{name}.diff").read_text()
    return [hunk.splitlines()[1:] for hunk in text.split("\n@@ ")[1:]]


@pytest.mark.parametrize("name", [program.name for program in PROGRAMS])
def test_a_diff_is_at_most_20_lines_and_has_no_more_context_than_patch_needs(name: str) -> None:
    lines = [line for hunk in parts(name) for line in hunk]
    assert 0 < sum(line[:1] in "+-" for line in lines if line) <= MOST
    for hunk in parts(name):
        runs = "".join("c" if line.startswith(" ") or not line else "x" for line in hunk)
        assert runs.strip("c")
        assert max(len(run) for run in runs.split("x")) <= CONTEXT, (name, hunk)


def test_each_diff_is_in_the_table_and_in_the_page() -> None:
    names = {program.name for program in PROGRAMS}
    assert {path.stem for path in DIFFS.glob("*.diff")} == names
    page = (ROOT / "docs" / "migrating.md").read_text()
    assert [name for name in sorted(names) if f"others/diffs/{name}.diff)" not in page] == []


def test_what_compares_two_runs_notices() -> None:
    """A life from scratch, one that leaves steps out, one with other weights, and one that ends early."""
    whole = list("abcdefgh")
    continues(whole, [list("abcd"), list("cde"), list("efgh")])
    for lives, words in (
        ([list("abcd"), list("abcdefgh")], "from scratch"),
        ([list("abc"), list("efgh")], "leaves out"),
        ([list("abc"), list("cxe")], "another run from optimizer step 4"),
        ([list("abc"), list("xfgh")], "never had"),
        ([list("abc"), list("cde")], "ends after 5 of 8"),
    ):
        with pytest.raises(AssertionError, match=words):
            continues(whole, lives)
