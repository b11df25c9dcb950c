"""An emulated accelerator: `install()` gives torch a device type "emu" with two devices, that is asynchronous and separate.

`torch.emu` has the functions of `torch.cuda` that the product uses, with their meaning. What only tests ask for is in `knobs`.
README.md says what is emulated, and what is not.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import shutil
import struct
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils import backend_registration

NAME, DEVICES = "emu", 2
_FOLDER = Path(__file__).parent
_BUILT = Path(__file__).parents[3] / "out" / "emulated_device"


def why_not() -> str:
    """Return why it cannot be built here, or ""."""
    if torch.accelerator.is_available() and not hasattr(torch, NAME):
        return "this machine has an accelerator, and a process has one kind of them"
    return "" if shutil.which(os.environ.get("CXX", "c++")) else "no C++ compiler"


def built() -> Path:
    """Return the extension module, built once for this release of torch and these sources: a minute of one core."""
    sources = [*sorted(_FOLDER.glob("*.h")), _FOLDER / "emulated.cpp"]
    said = torch.__version__.encode() + b"".join(source.read_bytes() for source in sources)
    folder = _BUILT / hashlib.sha256(said).hexdigest()[:16]
    if not (folder / "_emulated.so").exists():
        from torch.utils import cpp_extension

        folder.mkdir(parents=True, exist_ok=True)
        os.environ["PATH"] = f"{Path(shutil.which('ninja') or '/usr/bin/ninja').parent}:{os.environ['PATH']}"
        cpp_extension.load(
            "_emulated", [str(_FOLDER / "emulated.cpp")], extra_cflags=["-O1", "-std=c++20"], build_directory=str(folder),
            is_python_module=False,
        )  # fmt: skip
    return folder / "_emulated.so"


@functools.cache
def install() -> Any:
    """Register the device with torch, in this process and for its life; return the knobs of its tests."""
    spec = importlib.util.spec_from_file_location("_emulated", built())
    assert spec is not None
    assert spec.loader is not None
    core = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(core)
    backend_registration.rename_privateuse1_backend(NAME)
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
    torch._register_device_module(NAME, _module(core))
    return core


def _module(core: Any) -> Any:
    """Return `torch.emu`."""
    module: Any = types.ModuleType(f"torch.{NAME}")
    forked: list[bool] = []
    os.register_at_fork(after_in_child=lambda: forked.append(True) if core.contexts() else None)

    def index(device: Any) -> int:
        found = device if device is None or isinstance(device, int) else torch.device(device).index
        return int(core.current_device() if found is None else found)

    class device:  # noqa: N801 -- as torch.cuda.device
        def __init__(self, device: Any) -> None:
            self._index = -1 if device is None else index(device)

        def __enter__(self) -> None:
            self._before = core.exchange_device(self._index)

        def __exit__(self, *_: object) -> None:
            core.maybe_exchange_device(self._before)

    class Stream(torch.Stream):
        def __new__(cls, device: Any = None, priority: int = 0) -> Any:
            return super().__new__(cls, device=torch.device(NAME, index(device)), priority=priority)

    class Event(torch.Event):
        def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
            return super().__new__(cls, device=NAME, enable_timing=enable_timing, blocking=blocking)

    @contextlib.contextmanager
    def stream(wanted: torch.Stream | None) -> Iterator[None]:
        if wanted is None:
            yield
            return
        with device(wanted.device_index):
            before = torch.accelerator.current_stream(torch.device(NAME, wanted.device_index))
            torch.accelerator.set_stream(wanted)
            try:
                yield
            finally:
                torch.accelerator.set_stream(before)

    def get_rng_state(device: Any = None) -> torch.Tensor:
        words = struct.pack("<QQ", *core.generator_state(index(device)))
        return torch.frombuffer(bytearray(words), dtype=torch.uint8)

    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        core.set_generator_state(index(device), *struct.unpack("<QQ", state.numpy().tobytes()))

    class Runtime:
        """As torch.cuda.cudart(): numbers, no exceptions."""

        @staticmethod
        def cudaHostRegister(address: int, nbytes: int, _flags: int) -> int:
            return int(core.host_register(address, nbytes))

        @staticmethod
        def cudaHostUnregister(address: int) -> int:
            return int(core.host_unregister(address))

    vars(module).update(
        device=device, Stream=Stream, Event=Event, stream=stream, get_rng_state=get_rng_state, set_rng_state=set_rng_state,
        cudart=lambda: Runtime, is_available=lambda: True, is_initialized=lambda: bool(core.contexts()),
        _lazy_init=lambda: None, init=lambda: None, _is_in_bad_fork=lambda: bool(forked), device_count=lambda: DEVICES,
        current_device=core.current_device, set_device=lambda device: core.set_device(index(device)),
        _exchange_device=core.exchange_device, _maybe_exchange_device=core.maybe_exchange_device,
        current_stream=lambda device=None: torch.accelerator.current_stream(torch.device(NAME, index(device))),
        set_stream=torch.accelerator.set_stream,
        synchronize=lambda device=None: torch.accelerator.synchronize(torch.device(NAME, index(device))),
        manual_seed=lambda seed: core.manual_seed(core.current_device(), seed % (1 << 64)),
        manual_seed_all=lambda seed: [core.manual_seed(d, seed % (1 << 64)) for d in range(DEVICES)],
        memory_allocated=lambda device=None: core.memory_allocated(index(device)),
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
    )  # fmt: skip
    return module
