"""Programs of others with their diffs: killed twice, each ends as an unbroken run of it does, bit for bit.

`make test-others SOURCES=DIR`: DIR has a checkout of each repository under its own name (`nanoGPT`, `examples`, ...).
What is compared is seen by `observed.py`, which knows nothing of flashckpt: the weights behind every optimizer step, in
every life. The last checkpoints of both runs are compared too, and `flashckpt check` has to find the program exact.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.paths import ROOT

from flashckpt.checkpoint.catalog import list_checkpoints
from flashckpt.storage.factory import open_store
from integration.others.programs import PROGRAMS, Program

pytestmark = pytest.mark.timeout(1200)
HERE = Path(__file__).parent
MOST_S = 500
each_program = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)


class Bench:
    """A program with its data, and the runs of it.

    Args:
        program: Which.
        folder: An empty one.
    """

    def __init__(self, program: Program, folder: Path) -> None:
        self.program, self.folder = program, folder
        self._sources = sources_of(program)
        self._data = folder / "data"
        self._data.mkdir()
        data = [sys.executable, str(HERE / "data.py"), program.data, str(self._data)]
        subprocess.run(data, check=True, timeout=MOST_S, env=self._environment())

    def script(self, name: str, *, changed: bool = True) -> Path:
        """Return the script in a folder of its own, with the files beside it, with the diff or without, and made small."""
        repository, _, path = self.program.script.partition("/")
        own = self.folder / name
        script = own / path
        shutil.copytree(
            (self._sources / repository / path).parent, script.parent,
            ignore=lambda folder, names: [n for n in names if not n.endswith(".py") or Path(folder, n).is_dir()],
        )  # fmt: skip
        (own / "data").symlink_to(self._data)
        if changed:
            diff = HERE / "diffs" / f"{self.program.name}.diff"
            command = ["patch", "-p1", "--silent", "--no-backup-if-mismatch", "-i", str(diff)]
            done = subprocess.run(command, cwd=own, check=False, capture_output=True, text=True)
            assert done.returncode == 0, f"{diff.name} does not fit: {done.stdout}{done.stderr}"
        text = script.read_text()
        for old, new in self.program.smaller.items():
            assert old in text, f"{self.program.script} has no {old!r}: its source is another one than the table knows"
            text = text.replace(old, new)
        script.write_text(text)
        return script

    def run(self, script: Path, kills: Sequence[int] = ()) -> list[list[list[str]]]:
        """Run it to its end, killed where it is to be; return what each rank's lives saw."""
        records = self.folder / f"records-{script.relative_to(self.folder).parts[0]}"
        records.mkdir()
        ranks = self.program.ranks
        plan = json.dumps({"folder": str(records), "kills": list(kills), "victim": max(ranks - 1, 0)})
        words = [str(HERE / "observed.py"), plan, str(script), *self._arguments()]
        if ranks:
            launcher = ["-m", "flashckpt.daemon.run", "--nproc-per-node", str(ranks), "--max-restarts", str(len(kills))]
            words = [*launcher, *words]
        code, output = self._start(words, script.parent)
        for _ in kills if not ranks else ():
            assert code == -signal.SIGKILL, output
            code, output = self._start(words, script.parent)
        assert code == 0, output
        return [
            [path.read_text().split() for path in sorted(records.glob(f"{rank}.*"), key=lambda path: path.suffix)]
            for rank in range(max(ranks, 1))
        ]

    def check(self, script: Path) -> tuple[int, str]:
        """Return exit code and words of `flashckpt check`."""
        ranks = ["--nproc-per-node", str(self.program.ranks)] if self.program.ranks else []
        words = ["-m", "flashckpt.cli.main", "check", *ranks, *self.program.checked, str(script), *self._arguments()]
        return self._start(words, script.parent)

    def _start(self, words: Sequence[str], folder: Path) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, *words], cwd=folder, env=self._environment(), timeout=MOST_S,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout

    def _arguments(self) -> list[str]:
        return self.program.arguments.replace("{data}", str(self._data)).split()

    def _environment(self) -> dict[str, str]:
        path = ":".join(str(self._sources / folder) for folder in self.program.imports)
        quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        own = {
            "PYTHONPATH": f"{HERE / 'path'}:{path}:{ROOT}",
            "HF_HOME": str(self.folder / "hub"),
            "FLASHCKPT_DAEMON_LINGER": "0",
        }
        return {**os.environ, **quiet, **own}


def sources_of(program: Program) -> Path:
    """Return the folder of the checkouts; skip where the program or a package is not there."""
    sources = Path(os.environ.get("SOURCES") or pytest.skip("needs SOURCES=DIR, a folder of checkouts")).absolute()
    repositories = {program.script.partition("/")[0], *(folder.partition("/")[0] for folder in program.imports)}
    if lacking := sorted(name for name in repositories if not (sources / name).is_dir()):
        pytest.skip(f"{sources} has no {', '.join(lacking)}")
    if lacking := [name for name in program.needs if importlib.util.find_spec(name) is None]:
        pytest.skip(f"needs {', '.join(lacking)}")
    return sources


def continues(unbroken: list[str], lives: list[list[str]]) -> None:
    """Fail unless each life is a piece of the unbroken run that begins where the one before was, or earlier."""
    assert len(set(unbroken)) == len(unbroken), "a step changes nothing: places cannot be told apart"
    end = 0
    for number, life in enumerate(lives):
        assert life[0] in unbroken, f"life {number} begins with weights that the unbroken run never had"
        first = unbroken.index(life[0])
        pairs = zip(life, unbroken[first:], strict=False)
        same = next(
            (step for step, (one, other) in enumerate(pairs) if one != other), min(len(life), len(unbroken) - first)
        )
        assert same == len(life), f"life {number} is another run from optimizer step {first + same + 1} on"
        assert first <= end, f"life {number} leaves out optimizer steps {end + 1} to {first}"
        assert (first == 0) == (number == 0), f"life {number} begins from scratch"
        end = first + len(life)
    assert end == len(unbroken), f"it ends after {end} of {len(unbroken)} optimizer steps"


def assert_same_checkpoints(one: Path, other: Path, unlike: Sequence[str]) -> None:
    """Compare the last checkpoints of two roots, every tensor and value, but those whose bytes are a clock's."""
    steps = {max(info.step for info in list_checkpoints(open_store(root))) for root in (one, other)}
    assert len(steps) == 1, f"they end at steps {sorted(steps)}"
    step = str(steps.pop())
    command = [
        sys.executable,
        "-m",
        "flashckpt.cli.main",
        "diff",
        "--json",
        str(one),
        step,
        step,
        "--other",
        str(other),
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode in {0, 1}, done.stdout + done.stderr
    found = json.loads(done.stdout)
    names = [*found["only_a"], *found["only_b"], *(entry["fqn"] for entry in found["tensors"]), *found["values"]]
    left = [name for name in names if not any(fnmatch.fnmatchcase(name.partition("@")[0], u) for u in unlike)]
    assert left == [], found


@each_program
def test_killed_twice_it_ends_as_an_unbroken_run(program: Program, tmp_path: Path) -> None:
    bench = Bench(program, tmp_path)
    whole, killed = bench.script("unbroken"), bench.script("killed")
    unbroken = bench.run(whole)
    lives = bench.run(killed, program.kills)
    assert len(lives[-1]) == len(program.kills) + 1
    for (once,), several in zip(unbroken, lives, strict=True):
        continues(once, several)
    assert_same_checkpoints(whole.parent / program.root, killed.parent / program.root, program.unlike)
    if program.same_order:
        assert bench.run(bench.script("original", changed=False)) == unbroken, "the diff changes the training"


@each_program
def test_check_finds_it_exact(program: Program, tmp_path: Path) -> None:
    bench = Bench(program, tmp_path)
    code, output = bench.check(bench.script("checked"))
    assert code == 0, output
