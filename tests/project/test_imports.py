"""What may not be imported, held as tests; test_rooms.py holds the directions between rooms."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest
from support.paths import ROOT

OBJECT_COLLECTIVES = {
    f"{verb}_{what}"
    for verb in ("all_gather", "gather", "broadcast", "scatter", "send", "recv")
    for what in ("object", "object_list")
}


LINKS = sorted(path for top in ("flashckpt", "trainer") for path in (ROOT / top).iterdir() if path.is_symlink())
EXTRAS = {
    ".".join(("flashckpt", *path.relative_to(ROOT).parts)).replace("flashckpt.flashckpt.", "flashckpt."): path.resolve()
    for path in LINKS
    if path.resolve().is_relative_to(ROOT / "extras")
}
"""The packages of extras/ by the name that they are imported by."""


def modules(folder: str) -> list[Path]:
    """Return the Python files of one folder, without following the links inside it."""
    found = (ROOT / folder).resolve().rglob("*.py")
    inside = [path for path in found if not any((ROOT / q).is_symlink() for q in path.relative_to(ROOT).parents)]
    assert inside
    return inside


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Return the syntax tree of a file, flat; most tests look at every file."""
    return list(ast.walk(ast.parse(path.read_text())))


@functools.cache
def imported(path: Path) -> frozenset[str]:
    """Return every dotted name that a file imports, at module level or inside functions."""
    names: set[str] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def under(names: Collection[str], package: str) -> set[str]:
    return {name for name in names if name == package or name.startswith(package + ".")}


@pytest.mark.parametrize("other", ["flashckpt.sampler", "flashckpt.trainer", "flashckpt.daemon"])
def test_engine_imports_none_of_the_other_three(other: str) -> None:
    for path in modules("flashckpt"):
        assert not under(imported(path), other), f"{path.name} imports {other}"


ARROWS: dict[tuple[str, str], str] = {}
"""(module of the core, package of an extra) -> why the core still imports it. It may shrink, and nothing else."""


def test_the_core_imports_no_extra() -> None:
    """At its start, inside a function, or by a string: what is beside the core is found through `flashckpt.entry_points`."""
    assert len(EXTRAS) > 10
    found = set()
    for path in (path for top in ("flashckpt", "daemon", "sampler", "trainer") for path in modules(top)):
        strings = {
            n.value.partition(":")[0]
            for n in nodes_of(path)
            if isinstance(n, ast.Constant) and isinstance(n.value, str)
        }
        names = imported(path) | {text for text in strings if " " not in text}
        found |= {(path.relative_to(ROOT).as_posix(), extra) for extra in EXTRAS if under(names, extra)}
    wrong = sorted(f"{path} -> {extra}" for path, extra in found - ARROWS.keys())
    assert not wrong, "\n".join(["imports from the core into extras/:", *wrong])
    assert not ARROWS.keys() - found, f"cut already, remove it from ARROWS: {sorted(ARROWS.keys() - found)}"


def test_benchmarks_drive_the_public_class_and_not_the_parts_of_the_engine() -> None:
    """A copy of what `Checkpointer` does with them would go on measuring something else when they change."""
    inside = {"state", "snapshot", "planning", "session", "collectives"}
    programs = [*modules("flashckpt/bench"), *(ROOT / "benchmarks").glob("stall*.py")]
    assert len(programs) > 20
    for path in programs:
        wrong = {room for room in inside if under(imported(path), f"flashckpt.{room}")}
        assert not wrong, f"{path.name} imports {sorted(wrong)}"
        assert "._session" not in path.read_text(), f"{path.name} looks into the Checkpointer"


ARITHMETIC = {
    "__future__", "collections", "dataclasses", "enum", "functools", "itertools", "json", "math", "msgpack", "numbers", "numpy", "operator",
    "struct", "types", "typing", "xxhash",
}  # fmt: skip
"""All that `core` and `planning` may import that is not ours: nothing of it does I/O."""


PURE_OF_REPLICAS = ("partners", "replica_rounds", "replica_rows", "round_memory")


@pytest.mark.parametrize("package", ["core", "planning", "replicate"])
def test_pure_packages_do_no_io(package: str) -> None:
    for path in modules(f"flashckpt/{package}"):
        if package == "replicate" and path.stem not in PURE_OF_REPLICAS:
            continue
        foreign = {name.partition(".")[0] for name in imported(path)} - {"flashckpt"} - ARITHMETIC
        assert not foreign, f"{path.name} of {package} imports {sorted(foreign)}"
        calls = {ast.unparse(node.func) for node in nodes_of(path) if isinstance(node, ast.Call)}
        assert not calls & {"open", "print", "input"}, path.name


def test_sampler_imports_nothing_of_ours_but_errors() -> None:
    for path in modules("sampler"):
        ours = under(imported(path), "flashckpt")
        allowed = under(ours, "flashckpt.sampler") | under(ours, "flashckpt.errors") | {"flashckpt"}
        assert ours <= allowed, f"{path.name} imports {sorted(ours - allowed)}"


def test_daemon_does_not_import_trainer_or_sampler() -> None:
    for path in modules("daemon"):
        names = imported(path)
        assert not under(names, "flashckpt.trainer"), path.name


FOREIGN = tuple(f"extras/formats/{name}.py" for name in ("torch_files", "dcp_folders", "torch_checkpointing_folders"))
"""Write and read files of torch.save, dcp and torch_checkpointing for `flashckpt export` and `import`: the pickles in them are the
format that the user asked for, and are never ours. The test below says what they may do with them."""


def test_foreign_pickles_are_read_without_running_code() -> None:
    """`torch.load` with weights_only=True, and unpicklers that refuse every class but those of dcp's metadata."""
    nodes = [node for path in FOREIGN for node in nodes_of(ROOT / path)]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    loads = [call for call in calls if ast.unparse(call.func) == "torch.load"]
    assert loads
    for call in loads:
        assert {k.arg: ast.unparse(k.value) for k in call.keywords}["weights_only"] == "True"
    assert not [call for call in calls if ast.unparse(call.func) in ("pickle.load", "pickle.loads", "pickle.dump")]
    unpicklers = [n for n in nodes if isinstance(n, ast.ClassDef) and "pickle" in "".join(map(ast.unparse, n.bases))]
    assert len(unpicklers) == 2
    for one in unpicklers:
        assert "find_class" in {node.name for node in one.body if isinstance(node, ast.FunctionDef)}


def test_foreign_pickles_are_imported_only_when_they_are_asked_for() -> None:
    for path in (
        path for path in [*modules("flashckpt"), *modules("extras")] if path not in [ROOT / f for f in FOREIGN]
    ):
        top = [node for node in ast.parse(path.read_text()).body if isinstance(node, (ast.Import, ast.ImportFrom))]
        names = {ast.unparse(node) for node in top}
        assert not any(Path(file).stem in name for name in names for file in FOREIGN), (
            f"{path.name} imports it at its start"
        )


@pytest.mark.parametrize("folder", ["flashckpt", "sampler", "trainer", "daemon", "extras"])
def test_nothing_pickles(folder: str) -> None:
    """No pickle on disk, in shared memory or on a socket; torch.load and torch.save would be pickle by another name."""
    for path in (path for path in modules(folder) if path not in [ROOT / foreign for foreign in FOREIGN]):
        names = imported(path)
        for banned in ("pickle", "cloudpickle", "dill", "marshal", "shelve"):
            assert not under(names, banned), f"{path.name} imports {banned}"
        calls = {ast.unparse(node.func) for node in nodes_of(path) if isinstance(node, ast.Call)}
        banned_calls = {"torch.load", "torch.save"} if "bench" not in path.parts else {"torch.load"}
        objects = {call for call in calls if call.rpartition(".")[2] in OBJECT_COLLECTIVES}
        assert not (calls & banned_calls), f"{path.name} calls {calls & banned_calls}"
        assert not objects, f"{path.name} calls {objects}, which pickles"


@pytest.mark.parametrize(
    "module",
    [
        "flashckpt",
        "flashckpt.native",
        "flashckpt.cli.main",
        "flashckpt.interop.export_command",
        "flashckpt.interop.import_command",
        "flashckpt.daemon.persister.service",
    ],
)
def test_torch_is_not_imported_by(module: str) -> None:
    """The daemon and the command start in tenths of a second and hold no device context."""
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_bare_import_of_a_linked_package_is_refused() -> None:
    """`import sampler` from the repository root would make a second copy of every class."""
    for name in ("sampler", "trainer", "daemon", "extras"):
        result = subprocess.run(
            [sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert result.returncode != 0
        assert f"as flashckpt.{'NAME' if name == 'extras' else name}," in result.stderr


KINDS = {"cuda", "xpu", "npu", "mtia", "hpu", "mps", "cudart", "is_cuda"}
"""Modules of torch for one kind of device, and names that only one of them has."""


def test_one_module_of_the_core_names_a_kind_of_device() -> None:
    """All others ask it what a device can do: the path that runs on one kind is that of each."""
    named = {
        path.relative_to(ROOT).as_posix()
        for top in ("flashckpt", "daemon", "sampler")
        for path in modules(top)
        if any(isinstance(node, ast.Attribute) and node.attr in KINDS for node in nodes_of(path))
        or any(name.startswith(f"torch.{kind}") for name in imported(path) for kind in KINDS)
    }
    assert named == {"flashckpt/accelerator.py"}


def test_a_program_without_dtensor_does_not_pay_for_its_import() -> None:
    """Half as long as torch's own import: a first start, and each restore without dlrun, would wait for it."""
    program = (
        "import sys, torch, flashckpt\n"
        "model = torch.nn.Linear(2, 2)\n"
        "ckpt = flashckpt.Checkpointer(sys.argv[1], snapshot_every=1)\n"
        "ckpt.track(model=model)\n"
        "print(sorted({'torch.distributed.tensor', 'torch.distributed.fsdp'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, "/nowhere"], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
