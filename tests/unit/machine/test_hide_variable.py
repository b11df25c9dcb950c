"""A variable is taken out of what /proc shows of a process and its forks, and out of nothing else."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
from flashckpt.daemon.machine.process import hide_variable
shown = lambda: open("/proc/self/environ", "rb").read()
before = shown()
hide_variable("SECRET")
mine = shown()
if (pid := os.fork()) == 0:
    os._exit(0 if shown() == mine else 1)
assert os.waitpid(pid, 0)[1] == 0
assert len(before) == len(mine)
rest = lambda block: [one for one in block.split(b"\\0") if one and not one.startswith(b"SECRET=")]
assert rest(before) == rest(mine)
os.write(1, mine)
os.write(2, os.environb.get(b"SECRET", b"-"))
"""


@pytest.mark.parametrize("value", ["correct-horse", "x", "", "=a=b", "\udcff", None])
def test_value_is_gone_from_proc_and_kept_for_the_program(value: str | None) -> None:
    env = {**os.environ, "MY_SECRET": "kept", "SECRETS": "kept too"}
    env |= {} if value is None else {"SECRET": value}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, check=True)
    assert done.stderr == ("-" if value is None else value).encode(errors="surrogateescape")
    assert b"MY_SECRET=kept\0" in done.stdout
    assert b"SECRETS=kept too\0" in done.stdout
    if value:
        assert os.fsencode(value) not in [one.removeprefix(b"SECRET=") for one in done.stdout.split(b"\0")]
