"""flashckpt under other releases of torch: `python tests/integration/torch_versions/versions.py 2.11.0 2.15.0` (make test-torch-versions).

For each release: an environment of its own (gigabytes, since the package index has the others with CUDA only), the other
dependencies as pinned, then the checks below. The rows go to stdout and, with --write, into the table of docs/versions.md.
A release that cannot be installed is a row that says so. Ends with 1 where a check failed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "versions.md"
RELEASES = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
CHECKS = {
    "kill -9, exact resume": (
        "tests/integration/programs/programs_examples.py",
        "tests/integration/launcher/launcher_engine.py",
    ),
    "launcher contract": ("tests/integration/launcher/launcher_contract.py",),
    "engine, restore": (
        "tests/unit/session/test_engine.py",
        "tests/unit/session/test_engine_ranks.py",
        "tests/unit/restore/test_restore.py",
        "tests/unit/interop/test_dcp.py",
    ),
}
TORCH = "import torch, sys; print('.'.join(map(str, sys.version_info[:2])), torch.__version__)"
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->"
PURELIB = "import sysconfig; print(sysconfig.get_path('purelib'))"
QUIET = "print('hello')"


@dataclass(frozen=True)
class Row:
    """What one release did: a cell per column; `passed` is False where a check failed."""

    cells: tuple[str, ...]
    passed: bool


def install(release: str, folder: Path) -> str:
    """Make or complete the environment in `folder`; return "" or why it cannot be had.

    torch and what it asks for are its own; this tree and all other pinned dependencies are those of the environment that
    runs this program, found behind its own.
    """
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    purelib = subprocess.run([python, "-c", PURELIB], capture_output=True, text=True, check=True).stdout.strip()
    Path(purelib, "base.pth").unlink(missing_ok=True)
    if subprocess.run([python, "-c", "import torch"], capture_output=True, check=False).returncode:
        command = [str(python), "-m", "pip", "install", "--quiet", "--no-cache-dir", f"torch=={release}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return _last_line(done.stderr)
    Path(purelib, "base.pth").write_text(f"{ROOT}\n{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    return ""


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no message")


def check(release: str, folder: Path) -> Row:
    """Run all checks in an environment."""
    python = str(folder / "bin" / "python")
    found = subprocess.run([python, "-c", TORCH], capture_output=True, text=True, check=True).stdout.split()
    assert found[1].partition("+")[0] == release, f"{folder} holds torch {found[1]}"
    counts = [_pytest(python, files) for files in CHECKS.values()]
    demo = _demo(python)
    noise = _noise(python)
    passed = noise == 0 and demo == "identical" and not any("failed" in count or "error" in count for count in counts)
    return Row((found[1], found[0], demo, *counts, str(noise)), passed)


def _pytest(python: str, files: tuple[str, ...]) -> str:
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-W", "default", *files], cwd=ROOT, capture_output=True, text=True, check=False
    )
    sys.stderr.write("".join(f"{line}\n" for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))))
    counts = re.findall(r"(\d+ (?:passed|failed|skipped|errors?))", _last_line(done.stdout))
    return ", ".join(counts) or f"error {done.returncode}"


def _demo(python: str) -> str:
    """Run the demo (2x2x2, a rank killed, a machine lost), shorter than by default; "identical" is what it should say."""
    with tempfile.TemporaryDirectory() as folder:
        command = [python, "-m", "flashckpt.trainer.demo", "--folder", f"{folder}/demo", "--steps", "24"]
        command += ["--kill-after", "12", "--lose-after", "18"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 0 and "identical" in done.stdout:
        return "identical"
    sys.stderr.write(done.stdout[-2000:] + done.stderr[-4000:])
    return f"failed ({done.returncode})"


def _noise(python: str) -> int:
    """Return how many lines dlrun writes to stderr for a script that only prints, dlrun's own lines aside."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "hello.py")
        script.write_text(QUIET)
        command = [python, "-m", "flashckpt.daemon.run", "--nproc-per-node", "1", str(script)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.stdout == "hello\n", done
    return sum(not line.startswith("[dlrun]") for line in done.stderr.splitlines())


def table(rows: list[tuple[str, ...]]) -> str:
    """Return the rows as a Markdown table."""
    head = ("torch", "Python", "demo", *CHECKS, "lines of noise on stderr")
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def write(rows: list[tuple[str, ...]], page: Path = PAGE) -> None:
    """Put the rows into the table of the page; those of other releases stay."""
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    old, after = rest.split(END)
    known = [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in old.splitlines()[2:]]
    merged = {cells[0].partition("+")[0]: cells for cells in [*known, *rows]}
    text = table([merged[release] for release in sorted(merged, key=lambda name: [int(x) for x in name.split(".")])])
    page.write_text(f"{before}{BEGIN}{text}{END}{after}", encoding="utf-8")


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
            Row((release, *("not installed" for _ in range(len(CHECKS) + 2)), missing), passed=True)
            if missing
            else None
        )
        rows.append(row or check(release, options.folder / release))
        sys.stderr.write(f"{' | '.join(rows[-1].cells)}\n")
    sys.stdout.write(table([row.cells for row in rows]))
    if options.write:
        write([row.cells for row in rows])
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
