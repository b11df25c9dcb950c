"""Tells a command or webhook what happened: one typed record as JSON for each event, from a thread for which nothing waits.

Whatever the hook does, or fails to do, costs its record alone: it has DELIVERY_S seconds, MOST_DUE records may wait, and the
end of the process waits for them at most LAST_S. Each problem is named once, and again after another one or a success.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from typing import Any

from flashckpt.core.records import pack
from flashckpt.daemon.machine.process import own_child
from flashckpt.environment import env
from flashckpt.printable import printable

INCIDENT, UNHEALTHY, COMMITTED = EVENTS = ("incident", "node unhealthy", "checkpoint committed")
DELIVERY_S = 10.0
"""Seconds that one record may take: a command is killed then, with what it started."""
LAST_S = 5.0
"""Seconds that the end of a process waits for what is still to be sent."""
MOST_DUE = 64
VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class HookRecord:
    """What happened. docs/operations.md is the page for those who read it.

    Attributes:
        event: One of EVENTS.
        id: Of the event: a record that is delivered twice, as after the restart of a persister, has the same one.
        time: When it was made, ISO 8601, UTC.
        job: Id of the job; "" for a program without a Checkpointer.
        node, host: The node that it is about; -1 and "" for none, or where that is not known.
        reason: What happened, in words.
        root, generation, step: The checkpoint; of an incident the last step of the rank that it is about.
        incident: The whole record of the incident (docs/incidents.md); {} for none.
        version: Of this schema.
    """

    event: str
    id: str
    time: str
    job: str = ""
    sender: str = ""
    node: int = field(default=-1, metadata={"least": -1})
    host: str = ""
    reason: str = ""
    root: str = ""
    generation: int = -1
    step: int = -1
    incident: Mapping[str, Any] = field(default_factory=dict)
    version: int = VERSION


def of_incident(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the fields of each record about an incident: itself, and each node that is to be left out.

    Args:
        found: Its values (`flashckpt.core.incident.as_values`).
    """
    same = {"job": found["job"], "incident": found}
    made = [same | {"event": INCIDENT, "id": found["id"], "reason": found["verdict"]}
            | {name: found[name] for name in ("node", "host", "step")}]  # fmt: skip
    nodes = [(one["node"], one["host"], f"stopped answering {one['silent_s']} s ago") for one in found["lost"]]
    if not nodes and found["class"] == "machine" and found["host"] and found["kind"] != "straggler":
        nodes = [(found["node"], found["host"], found["what"])]
    for node, host, why in nodes:
        made.append(
            same | {"event": UNHEALTHY, "id": f"{found['id']}-{host}", "node": node, "host": host, "reason": why}
        )
    return made


class Hook:
    """Sends records one after the other.

    Args:
        words: The command, or a URL alone; FLASHCKPT_HOOK by default.
    """

    def __init__(self, log: logging.Logger, words: Sequence[str] | None = None) -> None:
        self._log, self._words = log, list(env.FLASHCKPT_HOOK if words is None else words)
        self._lock = threading.Lock()
        self._due: deque[bytes] = deque()
        self._thread: threading.Thread | None = None
        self._problem = ""

    def tell(self, event: str, **fields: Any) -> None:
        """Have a record sent; returns at once.

        Args:
            event: One of EVENTS.
            fields: Of `HookRecord`; of an incident `incident` alone.
        """
        made = of_incident(fields["incident"]) if event == INCIDENT else [fields | {"event": event}]
        now, host = datetime.now(timezone.utc).isoformat(timespec="milliseconds"), socket.gethostname()
        raw = [json.dumps(pack(HookRecord(time=now, sender=host, **one))).encode() + b"\n" for one in made]
        with self._lock:
            is_full = len(self._due) + len(raw) > MOST_DUE
            if not is_full:
                self._due.extend(raw)
                self._begin()
        if is_full:
            self._report(f"{MOST_DUE} records wait for it: more are dropped")

    def close(self, limit_s: float = LAST_S) -> None:
        """Wait for what is due; what takes longer is lost."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(limit_s)
            if thread.is_alive():
                self._report(f"it was still at work after {limit_s:g} s, when this process ended")

    def _begin(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="flashckpt-hook", daemon=True)
            with contextlib.suppress(RuntimeError):  # a limit on threads: the next record tries again
                thread.start()  # it waits for the lock
                self._thread = thread

    def _next(self) -> bytes | None:
        with self._lock:
            if self._due:
                return self._due.popleft()
            self._thread = None
            return None

    def _work(self) -> None:
        deliver: Callable[[bytes], str] = self._post if self._is_url() else self._run
        while (raw := self._next()) is not None:
            try:
                problem = deliver(raw)
            except Exception as error:  # noqa: BLE001 -- whatever it is, the job is worth more
                problem = f"{type(error).__name__}: {error}"
            self._report(problem)

    def _report(self, problem: str) -> None:
        if problem and problem != self._problem:
            self._log.warning("the hook failed: %s; training does not depend on it", printable(problem))
        self._problem = problem

    def _is_url(self) -> bool:
        return len(self._words) == 1 and self._words[0].startswith(("http://", "https://"))

    def _run(self, raw: bytes) -> str:
        """Give a command the record on its standard input; return what went wrong."""
        environment = {name: value for name, value in os.environ.items() if name != "FLASHCKPT_JOB_SECRET"}
        started = partial(
            subprocess.Popen,
            self._words,
            stdin=subprocess.PIPE,
            stdout=2,
            stderr=2,
            start_new_session=True,
            env=environment,
            cwd="/",
        )
        with own_child(started) as child:
            try:
                child.communicate(raw, timeout=DELIVERY_S)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait(DELIVERY_S)
                return f"{self._words[0]} was killed after {DELIVERY_S:g} s"
        return f"{self._words[0]} ended with exit code {child.returncode}" if child.returncode else ""

    def _post(self, raw: bytes) -> str:
        """Post the record; return what went wrong, without the URL: it may hold a secret."""
        from urllib import error, request

        class NoRedirect(request.HTTPRedirectHandler):
            def redirect_request(self, *_: Any) -> None:
                """Follow none: a POST would become a GET."""

        headers = {"Content-Type": "application/json", "User-Agent": "flashckpt"}
        asked = request.Request(self._words[0], raw, headers)  # noqa: S310 -- http or https, see _is_url
        begun = time.monotonic()
        try:
            with request.build_opener(NoRedirect).open(asked, timeout=DELIVERY_S):
                return ""
        except error.HTTPError as answer:
            with answer:
                return f"the webhook answered {answer.code}"
        except (error.URLError, OSError) as problem:
            reason = getattr(problem, "reason", problem)
            return (
                f"the webhook gave no answer ({reason})"
                if time.monotonic() - begun < DELIVERY_S
                else "the webhook gave no answer in time"
            )
