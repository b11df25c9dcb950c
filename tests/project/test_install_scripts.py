"""The scripts that install servers: one program that is there already does not stand for all of them."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.paths import TESTS

SCRIPTS = ("slurm/cluster.sh", "nfs/machines.sh", "s3/radosgw.sh")
WANTED = re.compile(r"if type -P ([^>\n]+?) >/dev/null; then return; fi")


@pytest.mark.parametrize("left_out", ["first", "last", "all", "nothing"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_everything_is_installed_unless_every_program_is_there(name: str, left_out: str, tmp_path: Path) -> None:
    """The script gets as far as asking for root, which it does not get, where something is missing."""
    script = TESTS / "integration" / name
    is_debian = platform.machine() == "x86_64" and "ID=debian" in Path("/etc/os-release").read_text().split()
    if name == "nfs/machines.sh" and not is_debian:
        pytest.skip("its packages are Debian's")
    for tool in ("bash", "dirname", "uname"):
        (tmp_path / tool).symlink_to(shutil.which(tool) or "")
    found = WANTED.search(script.read_text())
    assert found is not None
    programs = found.group(1).split()
    there = {"first": programs[1:], "last": programs[:-1], "all": [], "nothing": programs}[left_out]
    for program in ("id", *there):
        (tmp_path / program).write_text("#!/bin/bash\necho 1000\n")
        (tmp_path / program).chmod(0o755)
    done = subprocess.run(
        [tmp_path / "bash", script, "install"], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == (0 if left_out == "nothing" else 20), done.stderr
