"""Run PyTorch's own checkpoint tests on our storage: `python tests/integration/dcp/upstream_dcp.py PYTORCH_SOURCE [--only FILE ...]`.

The tests are not part of PyTorch's wheel, and not of this repository: give a source tree (its `test/distributed/checkpoint`
folder is enough), and `pip install expecttest`, which torch's test helpers import. The folder is copied, edited to run on
a CPU with gloo, and run twice: on torch's file-system storage, and with our reader and writer in its place. What comes out
is a table of the tests that do not pass on both. docs/interop.md explains them.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

PASSED = "passed"
# A graphics card by any other name: what these tests do with it, gloo and the CPU can do as well.
EDITS = (
    (r"\.cuda\([^()]*\)", ".cpu()"),
    (r'f?"cpu:gloo,[^"]*"', '"gloo"'),
    (r"(['\"])cuda(:\d+)?\1", '"cpu"'),
    (r'"nccl"', '"gloo"'),
    (r"f\"cuda:\{[^}]*\}\"", '"cpu"'),
    (r"torch\.cuda\.(set_device|synchronize|empty_cache|manual_seed)\([^()]*\)", "None"),
)
FILE_LIMIT_S, TEST_LIMIT_S = 900, 90


def install(*, ours: bool) -> None:
    """Prepare this process: no test is left out for want of cards; with `ours`, our storage in place of torch's."""
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed._tensor import common_dtensor

    def always(*_args: Any, **_kwargs: Any) -> Any:
        return lambda test: test

    for module in (common_distributed, common_dtensor):
        module.skip_if_lt_x_gpu = always  # type: ignore[attr-defined]  # where the tests import it from
    common_distributed.MultiProcessTestCase._spawn_processes = _fork  # type: ignore[method-assign]  # four imports of torch less
    if ours:
        _replace_storage()


def _fork(self: Any) -> None:
    import torch

    self._start_processes(torch.multiprocessing.get_context("fork").Process)


def _replace_storage() -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import _storage_utils, filesystem, format_utils

    from flashckpt.dcp import FlashStorageReader, FlashStorageWriter

    class Folder:
        """A folder is a root here: each save into it is its next step, each load takes the newest."""

        def __init__(self, path: Any, *_args: Any, **kwargs: Any) -> None:  # how bytes are laid out is ours alone
            named = {"overwrite": kwargs["overwrite"]} if "overwrite" in kwargs else {}
            super().__init__(path, **named)  # type: ignore[call-arg]  # of the class it is mixed into

        def reset(self, checkpoint_id: Any = None) -> None:
            super().reset()  # type: ignore[misc]  # of the class it is mixed into
            if checkpoint_id:
                self.root = self.checkpoint_id = os.fspath(checkpoint_id)

        @classmethod
        def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
            return "://" not in os.fspath(checkpoint_id)

    class Writer(Folder, FlashStorageWriter):
        pass

    class Reader(Folder, FlashStorageReader):
        pass

    for module in (dcp, _storage_utils, filesystem, format_utils):
        module.FileSystemWriter = Writer  # type: ignore[attr-defined]  # in each place that has imported it
        module.FileSystemReader = Reader  # type: ignore[attr-defined]  # the same


def prepare(source: Path, target: Path, *, ours: bool) -> None:
    """Copy the tests, edited for a CPU; each begins by calling `install`, also in the processes it spawns."""
    shutil.copytree(source / "test" / "distributed" / "checkpoint", target)
    for path in target.rglob("*.py"):
        text = path.read_text()
        for pattern, replacement in EDITS:
            text = re.sub(pattern, replacement, text)
        head = f"import upstream_dcp\nupstream_dcp.install(ours={ours})\n"
        future = re.search(r"^from __future__ .*\n", text, re.MULTILINE)
        at = future.end() if future else 0
        path.write_text(text[:at] + head + text[at:])


def run_file(path: Path, root: Path) -> dict[str, str]:
    """Run one file of tests and return test -> "passed", "skipped", or what it failed with."""
    here = Path(__file__).resolve()
    report = root / "report.xml"
    report.unlink(missing_ok=True)
    places = [here.parent, here.parents[3], path.parent]  # upstream_dcp, flashckpt, what the tests import of each other
    python = os.pathsep.join([*map(str, places), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": python, "OMP_NUM_THREADS": "1"}
    flags = ["-q", "-c", os.devnull, "--rootdir", str(root), "-p", "no:cacheprovider"]
    command = [
        sys.executable,
        "-m",
        "pytest",
        *flags,
        f"--junitxml={report}",
        f"--timeout={TEST_LIMIT_S}",
        "--import-mode=importlib",
        str(path),
    ]
    try:
        subprocess.run(
            command, env=environment, check=False, timeout=FILE_LIMIT_S, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"(the file)": f"no end within {FILE_LIMIT_S} s"}
    if not report.exists():
        return {"(the file)": "pytest was ended by a signal"}
    return dict(_outcomes(report))


def _outcomes(report: Path) -> Iterator[tuple[str, str]]:
    for case in ET.parse(report).iter("testcase"):
        name = f"{(case.get('classname') or '').rpartition('.')[2]}.{case.get('name')}"
        bad = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        if bad is None:
            yield name, PASSED
        elif bad.tag == "skipped":
            yield name, "skipped"
        else:
            yield name, _last_error(f"{bad.get('message') or ''}\n{bad.text or ''}")


def _last_error(text: str) -> str:
    """Return the last line that names an exception: of a rank's traceback, not of the parent that waited for it."""
    lines = [line.strip().removeprefix("E ").strip() for line in text.splitlines()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Timeout)\b", line)]
    own = [line for line in errors if "exited with error code" not in line and "Process " not in line]
    return ([*errors, *own] or ["failed"])[-1][:200]


def compared(source: Path, folder: Path, only: Collection[str]) -> Iterator[tuple[Path, dict[str, tuple[str, str]]]]:
    """Run files of tests on both storages; yield each and test -> (on torch's, on ours).

    Args:
        source: A PyTorch source tree.
        folder: An empty one, for copies and checkpoints.
        only: File names; empty: all.
    """
    first, second = folder / "theirs", folder / "ours"
    prepare(source, first, ours=False)
    prepare(source, second, ours=True)
    for path in sorted(first.rglob("test_*.py")):
        if only and path.name not in only:
            continue
        relative = path.relative_to(first)
        theirs, mine = run_file(path, first), run_file(second / relative, second)
        names = sorted(theirs | mine)
        yield relative, {name: (theirs.get(name, "not run"), mine.get(name, "not run")) for name in names}


def main() -> int:
    """Run all files on both storages and print what differs; 1 if anything does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a PyTorch source tree")
    parser.add_argument("--only", nargs="*", default=[], help="file names, e.g. test_planner.py")
    options = parser.parse_args()
    differs = 0
    with tempfile.TemporaryDirectory(prefix="upstream-dcp-") as folder:
        for relative, found in compared(options.source, Path(folder), options.only):
            same = sum(outcomes == (PASSED, PASSED) for outcomes in found.values())
            print(f"{relative}: {same} pass on both, of {len(found)}", flush=True)
            for name, (one, other) in found.items():
                if (one, other) != (PASSED, PASSED):
                    differs += one == PASSED
                    print(f"    {name}\n        torch:     {one}\n        flashckpt: {other}", flush=True)
    return 1 if differs else 0


if __name__ == "__main__":
    sys.exit(main())
