"""What wakes the daemon: inotify on small directories, polling where that fails. Never what it believes.

The daemon's truth is a scan of slot headers each second; an event only makes the next scan come sooner.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver
from watchdog.observers.polling import PollingObserver

_log = logging.getLogger(__name__)
_READING = ("opened", "closed_no_write")


class Wakeup(FileSystemEventHandler):
    """An event that files in `folders` set; `wait` returns at the first of them or after its time.

    Args:
        folders: Existing directories; not watched recursively.
        poll_s: Seconds between two polls if inotify is not available.
    """

    def __init__(self, folders: Sequence[Path], *, poll_s: float = 0.2) -> None:
        super().__init__()
        self._event = threading.Event()
        self._folders, self._poll_s = folders, poll_s
        self.is_polling = False
        self._observer = self._started()

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` seconds; True if something happened."""
        woken = self._event.wait(timeout_s)
        self._event.clear()
        return woken

    def wake(self) -> None:
        """Make the current or next `wait` return."""
        self._event.set()

    def close(self) -> None:
        """Stop the observer and join its thread."""
        if self._observer is not None:
            self._observer.stop()
            self._observer.join()

    def on_any_event(self, event: FileSystemEvent) -> None:
        """Wake on every change (a touch is "attrib" or "modified", by version of watchdog); reading a file is none."""
        if event.event_type not in _READING:
            self._event.set()

    def _started(self) -> BaseObserver | None:
        """Return what watches the folders, None where nothing can: then the daemon looks once a second."""
        try:
            return self._watching(Observer)
        except Exception as error:  # noqa: BLE001 -- no inotify instance, watch or thread left, not supported: a comfort
            _log.warning("inotify is not available (%s): looking for changes every %s s", error, self._poll_s)
        self.is_polling = True
        try:
            return self._watching(lambda: PollingObserver(timeout=self._poll_s))
        except Exception as error:  # noqa: BLE001 -- as above
            _log.warning("changes cannot be watched for (%s): looking once a second", error)
        return None

    def _watching(self, make: Callable[[], BaseObserver]) -> BaseObserver:
        observer = make()
        try:
            for folder in self._folders:
                observer.schedule(self, str(folder), recursive=False)
            observer.start()
        except Exception:
            observer.stop()  # else what watches the folders up to the one that failed fills a queue that nobody empties
            raise
        return observer
