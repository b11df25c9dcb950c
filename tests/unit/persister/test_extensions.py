"""Whatever an extension of the persister raises, wherever it does: the others are called, and it is said once."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from flashckpt import entry_points
from flashckpt.daemon.persister.extensions import Extensions
from flashckpt.entry_points import EntryPoint

NOTHING: Any = None


class Works:
    """An extension that does what it should."""

    def __init__(self, *_: object) -> None:
        self.calls: list[str] = []

    def turn(self, *_: object) -> None:
        self.calls.append("turn")

    def report(self, trouble: str) -> Any:
        self.calls.append(f"report {trouble}".strip())
        return {"replica_lag": 3}, {"shelf_bytes": 7.0}

    def close(self) -> None:
        self.calls.append("close")


def broken(where: str) -> type[Works]:
    def fail(*_: object) -> None:
        raise KeyError(where)

    return type("Broken", (Works,), {where: fail})


class Unknown(Works):
    """Reports what no status has."""

    def report(self, trouble: str) -> Any:
        super().report(trouble)
        return {"shelf": 1}, {"lost": 1.0}


def started(monkeypatch: pytest.MonkeyPatch, first: type[Works]) -> Extensions:
    monkeypatch.setitem(sys.modules, "plugged", SimpleNamespace(First=first, Second=Works))
    found = {name.lower(): EntryPoint(name.lower(), f"plugged:{name}", "other") for name in ("First", "Second")}
    monkeypatch.setattr(entry_points, "_own", dict)
    monkeypatch.setattr(entry_points, "_others", lambda: {entry_points.PERSISTER: found})
    return Extensions(NOTHING, NOTHING)


def used(extensions: Extensions) -> tuple[dict[str, Any], dict[str, float]]:
    for _ in range(3):
        extensions.turn(NOTHING, NOTHING, NOTHING)
        found = extensions.report()
    extensions.close()
    return found


@pytest.mark.parametrize("where", ["__init__", "turn", "report", "close"])
def test_what_one_extension_raises_costs_it_alone_and_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    extensions = started(monkeypatch, broken(where))
    assert used(extensions) == ({"replica_lag": 3}, {"shelf_bytes": 7.0})
    second: Any = extensions.each["second"]
    assert second.calls == ["turn", "report"] * 3 + ["close"]
    said = [record.getMessage() for record in caplog.records]
    assert [where in text and "first" in text for text in said] == [True]


def test_an_extension_is_told_in_its_report_what_its_turn_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    extensions = started(monkeypatch, broken("turn"))
    used(extensions)
    first: Any = extensions.each["first"]
    assert first.calls == ["report 'turn'"] * 3 + ["close"]


def test_fields_that_the_status_has_not_are_refused_with_all_of_that_report(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert used(started(monkeypatch, Unknown)) == ({"replica_lag": 3}, {"shelf_bytes": 7.0})
    assert "['shelf']" in caplog.text


def test_one_that_cannot_be_imported_is_said_and_the_others_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    extensions = started(monkeypatch, Works)
    monkeypatch.setattr(
        entry_points, "_others", lambda: {entry_points.PERSISTER: {"away": EntryPoint("away", "nowhere:X", "other")}}
    )
    assert not Extensions(NOTHING, NOTHING).each
    assert "the extension away does not start" in caplog.text
    assert len(extensions.each) == 2
