"""What is inside an object of a script and does not show in its `__dict__`: closures, defaults, slots, frames, positions."""

from __future__ import annotations

import functools
import gc
import inspect
import itertools
import operator
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CellType, CodeType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

_FOREIGN = tuple(str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "purelib", "platlib"))
_INSTALLED = frozenset(("site-packages", "dist-packages"))
"""Folders of packages, of this environment or of another one that it stands on."""
_NOT_FOLLOWED = ("flashckpt", "logging", "threading")
_HOLDERS = ("queue", "collections", "types", "functools", "multiprocessing.sharedctypes")
"""Modules of Python whose objects hold what a script puts into them."""
_MOST_BYTES = 1 << 20
"""Of a buffer that is read: larger ones are data, not a state that moves."""
_EMPTY: tuple[Iterable[object], ...] = ([], (), {}, {}.values(), {}.items(), set(), "", b"", range(0))
_ITERATORS = frozenset(type(iter(one)) for one in _EMPTY)


@functools.cache
def is_own(name: str | None) -> bool:
    """Return whether a module is the user's: not of Python, of an installed package or of flashckpt."""
    module = sys.modules.get(name or "")
    file = getattr(module, "__file__", None)
    if not file or (name or "").partition(".")[0] == "flashckpt":
        return False
    path = Path(file).resolve()
    return not str(path).startswith(_FOREIGN) and not _INSTALLED.intersection(path.parts)


def place_of(value: Any) -> str | None:
    """Return how far an iterator of Python has come, or what a buffer holds: an array, a C value, bytes. None for anything else."""
    if isinstance(value, itertools.count):
        return repr(value)
    if type(value) in _ITERATORS:
        return f"{operator.length_hint(value)} left"
    try:
        with memoryview(value) as view:
            return None if view.nbytes > _MOST_BYTES else repr(_items(value, view))
    except (TypeError, ValueError, BufferError):  # has no buffer, or not any more
        return None


def _items(value: Any, view: memoryview) -> Any:
    if hasattr(value, "value"):  # a C number
        return value.value
    return list(value) if isinstance(value, Sequence) or hasattr(value, "_length_") else view.tobytes().hex()


def _inner(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an iterator of Python iterates over, which it does not show: the one inside enumerate, cycle, map, zip."""
    found = gc.get_referents(value)
    found += [one for several in found if type(several) is tuple for one in several]
    for at, one in enumerate(one for one in found if hasattr(one, "__next__") or isinstance(one, FunctionType)):
        yield f"{type(value).__name__}.{at}", one


def _left_of_round(value: itertools.cycle[Any]) -> int:
    """Return how many items are left: behind its first round a cycle leads to no iterator, and says its place to copies alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return operator.length_hint(value.__reduce__()[1][0])


def contents(path: str, value: Any) -> Iterator[tuple[str, Any, bool]]:
    """Yield (path, value, whether it is of another library) of all that an object leads to."""
    if isinstance(value, FunctionType):
        yield from _of_function(path, value)
    elif isinstance(value, MethodType):
        yield f"{path}.__self__", value.__self__, True
        yield f"{path}.__func__", value.__func__, False
    elif isinstance(value, functools.partial):
        yield f"{path}.func", value.func, False
        yield from ((f"{path}.args[{at}]", one, False) for at, one in enumerate(value.args))
        yield from ((f"{path}.{name}", one, False) for name, one in value.keywords.items())
    elif isinstance(value, GeneratorType):
        if value.gi_frame is not None and is_own(value.gi_frame.f_globals.get("__name__")):
            # before it has variables
            yield f"{path}: begun", inspect.getgeneratorstate(value) != inspect.GEN_CREATED, False
            yield from ((f"{path}: {name}", one, False) for name, one in value.gi_frame.f_locals.items())
    elif isinstance(value, (type, ModuleType)):
        name = value.__module__ if isinstance(value, type) else value.__name__
        if is_own(name):
            where = f"{_prefix(name)}{value.__qualname__}" if isinstance(value, type) else name
            yield from ((f"{where}.{key}", one, False) for key, one in _named(vars(value)))
    elif type(value).__module__ in ("itertools", "builtins") and hasattr(value, "__next__"):
        yield from ((f"{path}: {name}", one, False) for name, one in _inner(value))
        if isinstance(value, itertools.cycle):
            yield f"{path}: left of the round", _left_of_round(value), False
    else:
        yield from _of_object(path, value)


def _of_object(path: str, value: Any) -> Iterator[tuple[str, Any, bool]]:
    kind = type(value)
    module = kind.__module__
    if module.partition(".")[0] in _NOT_FOLLOWED:
        return
    is_foreign = not is_own(module) and not {module, module.partition(".")[0]}.intersection(_HOLDERS)
    yield from ((f"{path}.{name}", one, is_foreign) for name, one in list(getattr(value, "__dict__", {}).items()))
    if is_foreign:
        return
    for one in kind.__mro__:
        slots = vars(one).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__") and hasattr(value, name):
                yield f"{path}.{name}", getattr(value, name), False
    yield kind.__qualname__, kind, False


def _of_function(path: str, value: FunctionType) -> Iterator[tuple[str, Any, bool]]:
    """Yield what a function of the user keeps and uses: its closure, its defaults, its attributes, its globals."""
    if not is_own(value.__module__):
        return
    cells: tuple[CellType, ...] = value.__closure__ or ()
    for name, cell in zip(value.__code__.co_freevars, cells, strict=True):
        try:
            inside = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        yield f"{name} of {value.__name__}()", inside, False
    own = value.__code__.co_varnames[: value.__code__.co_argcount]
    given = [
        *zip(reversed(own), reversed(value.__defaults__ or ()), strict=False),
        *(value.__kwdefaults__ or {}).items(),
    ]
    yield from ((f"{name} of {value.__name__}()", one, False) for name, one in given)
    yield from ((f"{path}.{name}", one, False) for name, one in vars(value).items())
    for name in _names(value.__code__):
        if name in value.__globals__:
            yield f"{_prefix(value.__module__)}{name}", value.__globals__[name], False


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that a function uses, those of the functions inside it too."""
    yield from code.co_names
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _names(one)


def _named(names: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in list(names.items()):
        if not name.startswith("__") or isinstance(value, FunctionType):
            yield name, value.__func__ if isinstance(value, (staticmethod, classmethod)) else value


def _prefix(module: str) -> str:
    return "" if module == "__main__" else f"{module}."
