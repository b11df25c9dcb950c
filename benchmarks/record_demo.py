"""Record `make demo` in a pseudo terminal, and draw two pictures of that one run: what it prints, and its restart.

    python benchmarks/record_demo.py            # docs/assets/demo.svg and docs/assets/restart.svg, in about two minutes
    python benchmarks/record_demo.py --redraw   # the same pictures from the recording in out/

The recording is an asciicast (version 2): a header, then one line [seconds, "o", text] per piece of output.
"""

from __future__ import annotations

import argparse
import codecs
import fcntl
import json
import os
import platform
import pty
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from demo_frames import Pacing, frames_of, paced
from demo_svg import animated_svg
from restart_svg import timeline_svg

COLUMNS, ROWS = 110, 46
RECORDING = Path("out/demo.cast")
DEMO = Path("out/demo")
PICTURES = Path(__file__).resolve().parents[1] / "docs" / "assets"
PACING = Pacing(longest_pause_s=1.5)
MODULE = ["-m", "flashckpt.trainer.demo", "--folder", str(DEMO)]


def record(command: Sequence[str], path: Path, header: dict[str, Any]) -> int:
    """Run a command in a pseudo terminal, write what it prints and when, and return its exit code."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as out:
        out.write(json.dumps(header) + "\n")
        began = time.monotonic()
        process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment)
        os.close(slave)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may be cut by the end of a read
        while data := _read(master):
            out.write(json.dumps([round(time.monotonic() - began, 3), "o", decoder.decode(data)]) + "\n")
            sys.stdout.buffer.write(data)
            sys.stdout.flush()
    os.close(master)
    return process.wait()


def _read(master: int) -> bytes:
    try:
        return os.read(master, 1 << 16)
    except OSError:  # Linux: EIO once the last writer has closed its end
        return b""


def machine() -> str:
    """Return what the captions say about where the run took place."""
    import torch

    cores = len(os.sched_getaffinity(0))
    return f"{cores} CPU cores, no GPU, Python {platform.python_version()}, torch {torch.__version__.partition('+')[0]}"


def read_recording(path: Path) -> tuple[dict[str, Any], list[tuple[float, str]]]:
    """Return the header of a recording and what was printed when."""
    header, *lines = path.read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return json.loads(header), [(at_s, text) for at_s, kind, text in events if kind == "o"]


def draw(recording: Path, ledger: Path, pictures: Path) -> None:
    """Write both pictures of one recorded run."""
    header, events = read_recording(recording)
    frames, shortened = paced(frames_of(events, header["width"], header["height"]), PACING)
    where = f"recorded on {header['date']}: {header['machine']}"
    note = f"{shortened} pauses of more than {PACING.longest_pause_s:g} s are shortened to that; the run took {events[-1][0]:.0f} s"
    pictures.mkdir(parents=True, exist_ok=True)
    demo = animated_svg(
        frames, header["width"], "make demo: a rank of a 2x2x2 run is killed, and nothing is lost", [where, note]
    )
    (pictures / "demo.svg").write_text(demo)
    record = json.loads(ledger.read_text().splitlines()[0])
    title = f"From SIGKILL of rank {record['rank']} to the next step, 8 ranks (DP 2 x TP 2 x PP 2)"
    steps = f"{record['steps_lost']} steps were trained again after that; the same run as the recording of make demo"
    (pictures / "restart.svg").write_text(timeline_svg(record, title, [where, steps]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--redraw", action="store_true", help="do not run the demo again: draw the recording in out/")
    if not parser.parse_args().redraw:
        header = {
            "version": 2,
            "width": COLUMNS,
            "height": ROWS,
            "date": time.strftime("%Y-%m-%d"),
            "machine": machine(),
        }
        if code := record([sys.executable, *MODULE], RECORDING, header):
            sys.exit(code)
    draw(RECORDING, DEMO / "crash" / "ledger.jsonl", PICTURES)
    for path in sorted(PICTURES.glob("*.svg")):
        print(f"{path}  {path.stat().st_size / 1e3:.0f} KB")


if __name__ == "__main__":
    main()
