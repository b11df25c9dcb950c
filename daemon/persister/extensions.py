"""Work of plug-ins that the persister does besides persisting. Whatever one raises costs that one, and is logged once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from flashckpt import entry_points
from flashckpt.core.lineage import Generation
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.plugin import PersisterExtension
from flashckpt.shm.inventory import NodeInventory
from flashckpt.shm.job_directory import DaemonStatus, JobConfig, JobDirectory

_log = logging.getLogger("flashckpt.daemon")
_FIELDS = frozenset(field.name for field in fields(DaemonStatus))


class Extensions:
    """The extensions of all installed packages.

    Attributes:
        each: Those that have started, by the name of their entry point.
    """

    def __init__(self, directory: JobDirectory, wake: Callable[[], None]) -> None:
        self.each: dict[str, PersisterExtension] = {}
        self._troubles: dict[tuple[str, str], str] = {}
        for entry in entry_points.every(entry_points.PERSISTER):
            try:
                if (kind := entry.load_if_installed()) is not None:
                    self.each[entry.name] = kind(directory, wake)
            except Exception as error:  # noqa: BLE001 -- code of others must not keep anything from being persisted
                _log.error("the extension %s does not start: %s", entry.name, _said(error))

    def turn(
        self, config: JobConfig, view: NodeInventory, record: Generation, committed: SnapshotId | None = None
    ) -> None:
        """Take each a turn further."""
        for name, extension in self.each.items():
            try:
                extension.turn(config, view, record, committed)
            except Exception as error:  # noqa: BLE001 -- as above
                self._note(name, "turn", error)
            else:
                self._troubles[name, "turn"] = ""

    def report(self) -> tuple[dict[str, Any], dict[str, float]]:
        """Return what they add to the status, by field of DaemonStatus, and to the metrics."""
        status: dict[str, Any] = {}
        numbers: dict[str, float] = {}
        for name, extension in self.each.items():
            try:
                said, measured = extension.report(self._troubles.get((name, "turn"), ""))
                if unknown := sorted(said.keys() - _FIELDS):
                    raise ValueError(f"its report has fields that the status has not: {unknown}")  # noqa: TRY301
            except Exception as error:  # noqa: BLE001 -- as above
                self._note(name, "report", error)
                continue
            status |= said
            numbers |= measured
        return status, numbers

    def observe(self, families: Callable[[], Any]) -> None:
        """Let those that have an `observe` call `families`, which returns the metrics of now as Prometheus has them."""
        for name, extension in self.each.items():
            try:
                if (observe := getattr(extension, "observe", None)) is not None:
                    observe(families)
            except Exception as error:  # noqa: BLE001 -- as above
                self._note(name, "observe", error)

    def close(self) -> None:
        """End their threads."""
        for name, extension in self.each.items():
            try:
                extension.close()
            except Exception as error:  # noqa: BLE001 -- as above
                self._note(name, "close", error)

    def _note(self, name: str, where: str, error: Exception) -> None:
        """Log what was raised, where it is not what the same method raised last."""
        trouble = _said(error)
        if trouble != self._troubles.get((name, where)):
            _log.warning("%s() of the extension %s failed: %s", where, name, trouble)
        self._troubles[name, where] = trouble


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__
