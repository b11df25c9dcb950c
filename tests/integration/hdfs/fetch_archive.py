"""Fetch one file from pip's package index without building it: `python fetch_archive.py NAME-VERSION.tar.gz TARGET`.

`pip download` runs the setup.py of a source archive, which may need what is not there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import urllib.parse
import urllib.request
from pathlib import Path

from pip._internal.models.index import PyPI


def index_url() -> str:
    """Return where pip looks for packages."""
    asked = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    configured = subprocess.run(asked, capture_output=True, check=False, text=True).stdout.strip()
    found: str = os.environ.get("PIP_INDEX_URL") or configured or PyPI.simple_url
    return found


def link_of(archive: str) -> str:
    """Return the address of a file that the index lists."""
    page = f"{index_url().rstrip('/')}/{archive.partition('-')[0]}/"
    with urllib.request.urlopen(page, timeout=60) as answer:
        text = answer.read().decode()
    link = re.search(rf'href="([^"#]*/{re.escape(archive)})[#"]', text)
    if link is None:
        raise SystemExit(f"{archive} is not in the index")
    return str(urllib.parse.urljoin(page, link[1]))


def main() -> None:
    """Fetch it."""
    archive, target = sys.argv[1:]
    with urllib.request.urlopen(link_of(archive), timeout=60) as answer, Path(target).open("wb") as file:
        shutil.copyfileobj(answer, file, 1 << 20)


if __name__ == "__main__":
    main()
