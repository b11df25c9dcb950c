"""What the kernel logs while a job runs, and the state of this node's links and devices: evidence for an incident.

In: /dev/kmsg or a file of the same lines, /sys/class/net, NVML where its Python module is installed. Out: lines. Nothing
raises, nothing waits longer than it says: a node on which none of it can be read has none.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path

_MOST_READ = 1 << 20
_SIOCGIFADDR = 0x8915
_NET = Path("/sys/class/net")
DEVICES_S = 1.0
"""Seconds that a driver may take to answer; one that lost its device may never do."""


class KernelLog:
    """The lines that came since this was made, of those that matter.

    Args:
        path: /dev/kmsg, or a text file.
        matters: Whether a line does.
    """

    def __init__(self, path: str, matters: Callable[[str], object]) -> None:
        self._matters, self._fd = matters, -1
        with contextlib.suppress(OSError):
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._fd, 0, os.SEEK_END)

    def fresh(self, most: int = 8) -> list[str]:
        """Return the newest lines that came since the last call."""
        found: list[str] = []
        left = _MOST_READ if self._fd >= 0 else 0
        while left > 0:
            try:
                raw = os.read(self._fd, 8192)  # of /dev/kmsg: one record
            except BrokenPipeError:
                continue  # records were overwritten before they were read
            except OSError:
                break
            if not raw:
                break
            left -= len(raw)
            lines = raw.decode(errors="replace").splitlines()
            found += [line.partition(";")[2] or line for line in lines if self._matters(line)]
        return found[-most:]

    def close(self) -> None:
        """Close the log."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


class Links:
    """This node's network links, cards and those with an address: what has changed since this was made.

    The ends of links that containers have on this machine come and go, and bridges lose their carrier with the last of them.
    """

    def __init__(self, folder: Path = _NET, addressed: Callable[[str], bool] | None = None) -> None:
        self._folder, self._addressed = folder, addressed or _has_address
        self._before = self._look()

    def changed(self) -> list[str]:
        """Return a line for each link that went down since, or did and came back."""
        found, now = [], self._look()
        for name, (state, changes) in sorted(self._before.items()):
            after, later = now.get(name, ("gone", changes))
            if state == "up" and after != "up":
                found.append(f"link {name} is {after}")
            elif later > changes and state == "up":
                found.append(f"link {name} was lost and came back")
        return found

    def _look(self) -> dict[str, tuple[str, int]]:
        found = {}
        with contextlib.suppress(OSError):
            for path in self._folder.iterdir():
                if path.name == "lo" or (path / "bridge").exists():
                    continue
                if not (path / "device").exists() and not self._addressed(path.name):
                    continue
                with contextlib.suppress(OSError, ValueError):
                    state = (path / "operstate").read_text().strip()
                    found[path.name] = state, int((path / "carrier_changes").read_text())
        return found


def _has_address(name: str) -> bool:
    """Whether a link has an IPv4 address; it keeps it while it is down."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return True
    return False


def device_errors(limit_s: float = DEVICES_S) -> list[str]:
    """Return what NVML reports about this node's devices: lost ones, and uncorrected memory errors; [] without it."""
    found: list[str] = []
    thread = threading.Thread(target=_ask_devices, args=(found,), name="flashckpt-devices", daemon=True)
    thread.start()
    thread.join(limit_s)
    return ["the driver of the devices does not answer"] if thread.is_alive() else found


def _ask_devices(found: list[str]) -> None:
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # noqa: BLE001 -- not installed, no driver: nothing is known
        return
    for number in range(nvml.nvmlDeviceGetCount()):
        try:
            device = nvml.nvmlDeviceGetHandleByIndex(number)
            count = nvml.nvmlDeviceGetTotalEccErrors(
                device, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            )
        except Exception as error:  # noqa: BLE001 -- each driver has errors of another class
            if "lost" in str(error).lower():
                found.append(f"device {number}: GPU is lost ({error})")
            continue
        if count:
            found.append(f"device {number}: {count} uncorrectable ECC errors since its driver was loaded")
