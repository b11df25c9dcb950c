"""flashckpt under other releases of torch: `python tests/versions.py 2.11.0 2.15.0` (make test-torch-versions).

For each release: an environment of its own (gigabytes, since the package index has older releases with CUDA only), this
tree and its pinned dependencies in it, then the checks below. The table goes to stdout and, with --write, into docs/versions.md.
A release that cannot be installed is a row that says so. Ends with 1 where a check failed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "versions.md"
RELEASES = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
CHECKS = {
    "kill -9, exact resume": ("tests/test_examples.py", "tests/test_engine_launchers.py"),
    "killed, hanging, stopped under dlrun": ("tests/test_dlrun_engine.py",),
    "launcher contract": ("tests/launcher_contract.py",),
    "engine, restore": (
        "tests/test_engine.py",
        "tests/test_engine_ranks.py",
        "tests/test_restore.py",
        "tests/test_dcp.py",
    ),
}
TORCH = "import torch, sys; print('.'.join(map(str, sys.version_info[:2])), torch.__version__)"
QUIET = "import sys; print('hello')"


@dataclass(frozen=True)
class Row:
    """What one release did: a cell per column; `passed` is False where a check failed."""

    cells: tuple[str, ...]
    passed: bool


def install(release: str, folder: Path) -> str:
    """Make or complete the environment in `folder`; return "" or why it cannot be had."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    if subprocess.run([python, "-c", "import torch"], capture_output=True, check=False).returncode:
        done = _pip(python, f"torch=={release}")
        if done.returncode:
            return _last_line(done.stderr)
    pins = [f"torch=={release}"]
    pins += [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("torch==")]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join(pins))
        constraints.flush()
        done = _pip(python, "-c", constraints.name, "-e", f"{ROOT}[fast,trainer,data,test]")
    return _last_line(done.stderr) if done.returncode else ""


def _pip(python: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-m", "pip", "install", "--quiet", "--no-cache-dir", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no message")


def check(release: str, folder: Path) -> Row:
    """Run all checks in an environment."""
    python = str(folder / "bin" / "python")
    found = subprocess.run([python, "-c", TORCH], capture_output=True, text=True, check=True).stdout.split()
    assert found[1].partition("+")[0] == release, f"{folder} holds torch {found[1]}"
    counts = [_pytest(python, files) for files in CHECKS.values()]
    noise = _noise(python)
    passed = noise == 0 and not any("failed" in count or "error" in count for count in counts)
    return Row((found[1], found[0], *counts, str(noise)), passed)


def _pytest(python: str, files: tuple[str, ...]) -> str:
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-W", "default", *files], cwd=ROOT, capture_output=True, text=True, check=False
    )
    sys.stderr.write("".join(f"{line}\n" for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))))
    counts = re.findall(r"(\d+ (?:passed|failed|skipped|errors?))", _last_line(done.stdout))
    return ", ".join(counts) or f"error {done.returncode}"


def _noise(python: str) -> int:
    """Return how many lines dlrun writes to stderr for a script that only prints, dlrun's own lines aside."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "hello.py")
        script.write_text(QUIET)
        command = [python, "-m", "flashckpt.daemon.run", "--nproc-per-node", "1", str(script)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.stdout == "hello\n", done
    return sum(not line.startswith("[dlrun]") for line in done.stderr.splitlines())


def table(rows: list[Row]) -> str:
    """Return the rows as a Markdown table."""
    head = ("torch", "Python", *CHECKS, "lines of noise on stderr")
    lines = [head, tuple("---" for _ in head), *(row.cells for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def write(text: str, page: Path = PAGE) -> None:
    """Put the table between the marks of the page."""
    begin, end = "<!-- table -->\n", "<!-- end of table -->"
    before, rest = page.read_text(encoding="utf-8").split(begin)
    page.write_text(f"{before}{begin}{text}{end}{rest.split(end)[1]}", encoding="utf-8")


def main() -> int:
    """Test the releases that are named, or those of the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("releases", nargs="*", default=RELEASES)
    parser.add_argument("--folder", type=Path, default=ROOT / ".venv-versions", help="where the environments lie")
    parser.add_argument("--write", action="store_true", help="put the table into docs/versions.md")
    options = parser.parse_args()
    rows = []
    for release in options.releases:
        missing = install(release, options.folder / release)
        row = (
            Row((release, *("not installed" for _ in range(len(CHECKS) + 1)), missing), passed=True)
            if missing
            else None
        )
        rows.append(row or check(release, options.folder / release))
        sys.stderr.write(f"{' | '.join(rows[-1].cells)}\n")
    sys.stdout.write(table(rows))
    if options.write:
        write(table(rows))
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
