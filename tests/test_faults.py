"""No crash point without a call in the product, and none that no test kills at."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flashckpt.faults import CRASH_POINTS

ROOT = Path(__file__).resolve().parent.parent
# Groups of which a test takes every point from CRASH_POINTS; the points of other groups are named one by one.
ENUMERATED = {"slot": "test_segment.py", "segment": "test_segment.py", "persist": "test_daemon_crash.py"}
ENUMERATED |= {"generation": "test_daemon_crash.py", "store": "test_daemon_crash.py"}


def product() -> str:
    folders = ("flashckpt", "daemon", "trainer", "sampler")
    return "".join(path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py"))


def test_points_that_are_declared_are_the_points_that_are_called() -> None:
    assert set(re.findall(r'crash_point\("([a-z.-]+)"\)', product())) == set(CRASH_POINTS)


@pytest.mark.parametrize("point", CRASH_POINTS)
def test_every_point_is_killed_at_by_a_test(point: str) -> None:
    group = point.partition(".")[0]
    if group in ENUMERATED:
        text = (ROOT / "tests" / ENUMERATED[group]).read_text()
        assert "in CRASH_POINTS if" in text
        assert group in text
    else:
        tests = [path.read_text() for path in (ROOT / "tests").glob("test_*.py") if path.name != Path(__file__).name]
        assert any(f'"{point}"' in text for text in tests), f"no test kills at {point}"
