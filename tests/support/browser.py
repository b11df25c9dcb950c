"""A headless Chromium, driven over its debugging pipe: no driver and no package is needed."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
DEADLINE_S = 60.0


class Page:
    """One open page."""

    def __init__(self, process: subprocess.Popen[bytes], to: int, of: int) -> None:
        self.process, self._to, self._of = process, to, of
        self._number, self._left, self._session = 0, b"", ""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def ask(self, method: str, **params: Any) -> Any:
        """Call a method of the debugging protocol and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        raw = json.dumps(message).encode() + b"\0"
        while raw:
            raw = raw[os.write(self._to, raw) :]
        while (answer := self._read()).get("id") != self._number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        end = time.monotonic() + DEADLINE_S
        while b"\0" not in self._left:
            ready, _, _ = select.select([self._of], [], [], max(0.0, end - time.monotonic()))
            data = os.read(self._of, 1 << 20) if ready else b""
            assert data, f"Chromium does not answer (exit code {self.process.poll()})"
            self._left += data
        raw, _, self._left = self._left.partition(b"\0")
        found: dict[str, Any] = json.loads(raw)
        return found

    def open(self, url: str) -> None:
        """Go to an address, and wait until it is loaded."""
        self.ask("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def value(self, code: str) -> Any:
        """Return what an expression yields on the page."""
        found = self.ask("Runtime.evaluate", expression=code, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, code: str, deadline_s: float = DEADLINE_S) -> Any:
        """Wait until an expression is true on the page; return its value."""
        end = time.monotonic() + deadline_s
        while not (found := self.value(code)):
            assert time.monotonic() < end, f"{code}: {self.value('document.body.innerText')}"
            time.sleep(0.05)
        return found

    def text(self, name: str = "main") -> str:
        """Return the text of an element as a person sees it."""
        return str(self.value(f"document.getElementById({json.dumps(name)}).innerText"))

    def press(self, key: str, code: int) -> None:
        """Press a key."""
        for kind in ("rawKeyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def shot(self, path: Path, *, width: int = 1200, height: int = 0, dark: bool = False, top: int = 0) -> None:
        """Write a picture of the page, of `height` pixels from `top` on; 0: of all of it."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.ask("Emulation.setEmulatedMedia", features=scheme)
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        whole = self.value("document.documentElement.scrollHeight")
        clip = {"x": 0, "y": top, "width": width, "height": height or whole, "scale": 1}
        found = self.ask("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """Start Chromium with a profile to itself, and end it."""
    assert CHROMIUM is not None
    ends = [*os.pipe(), *os.pipe()]
    in_read, in_write, out_read, out_write = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)  # not 3 or 4
    for end in ends:
        os.close(end)
    options = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={profile}",
    ]
    # bash: others know no descriptor of two digits
    words = [
        "bash",
        "-c",
        f'exec "$@" 3<&{in_read} 4>&{out_write}',
        "bash",
        CHROMIUM,
        *options,
        "--remote-debugging-pipe",
    ]
    process = subprocess.Popen(
        words, pass_fds=(in_read, out_write), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    os.close(in_read)
    os.close(out_write)
    try:
        yield Page(process, in_write, out_read)
    finally:
        os.close(in_write)  # it ends with its pipe
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(out_read)


@contextlib.contextmanager
def dashboard(*words: object, env: dict[str, str] | None = None) -> Iterator[str]:
    """Start `flashckpt dashboard` as a user does; give the address that it prints."""
    command = [
        sys.executable,
        "-u",
        "-c",
        "from flashckpt.cli.entry import main; main()",
        "dashboard",
        *map(str, words),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **(env or {})}) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0, "Ctrl-C ends it"
