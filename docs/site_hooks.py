"""Hooks of the documentation site (mkdocs.yml): pages that live at the top of the repository, and links out of docs/.

README.md and its neighbours are read where they are, so that the site and the repository cannot differ.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

TOP = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
"""Files at the top of the repository, and what they are called in the site."""
SOURCE = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages that are made of files at the top of the repository."""
    for name, page in TOP.items():
        files.append(File.generated(config, page, content=(_root(config) / name).read_text()))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Point links at pages of the site; a link to a file that is no page becomes the file's name."""
    home = next((name for name, target in TOP.items() if target == page.file.src_uri), f"docs/{page.file.src_uri}")

    def replaced(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(home), match[1]))
        if not (_root(config) / target).exists():
            return match[0]  # left as it is: the strict build names it
        page_of = TOP.get(target, target.removeprefix("docs/"))
        if files.get_file_from_path(page_of) is None:
            return f"]({_missing(target)})"
        return f"]({posixpath.relpath(page_of, posixpath.dirname(page.file.src_uri) or '.')}{match[2] or ''})"

    return _plain_names(SOURCE.sub(replaced, markdown))


def _missing(target: str) -> str:
    return f"repository:{target}"


def _plain_names(markdown: str) -> str:
    return re.sub(r"\[([^\]]*)\]\(repository:([^)]*)\)", r"\1 (`\2`)", markdown)


def _root(config: Any) -> Path:
    return Path(config.config_file_path).parent
