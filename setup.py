"""The C part, optional: without a compiler, or with FLASHCKPT_PURE=1, the Python implementation runs. Links stay links in an sdist.

One build serves every Python from 3.10 on (limited API); free-threaded ones have no such API and do without.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.sdist import sdist

FOLDER = Path("flashckpt/native")
HAS_LIMITED_API = not sysconfig.get_config_var("Py_GIL_DISABLED")
IS_NATIVE = HAS_LIMITED_API and os.environ.get("FLASHCKPT_PURE") != "1"
TOPS = ("flashckpt", "trainer")
"""The folders that hold links to other ones."""


def refuse_without_links() -> None:
    """End with the reason where links are text files, as git writes them with core.symlinks=false, or are not there."""
    files = [path for top in TOPS for path in Path(top).iterdir() if path.is_file() and not path.suffix]
    texts = {path: path.read_text(errors="replace").strip() for path in files if path.stat().st_size < 100}
    wrong = [f"{path} is a file that says {text}" for path, text in texts.items() if text.startswith("../")]
    needed = [Path("flashckpt", name) for name in ("daemon", "sampler", "trainer")]
    wrong += [f"{path} is missing" for path in needed if not path.exists()]
    if wrong:
        sys.exit(
            f"flashckpt cannot be built: its symbolic links are not there\n"
            f"  found:    {wrong[0]}" + (f", and {len(wrong) - 1} more" if len(wrong) > 1 else "") + "\n"
            "  expected: links to folders\n"
            "  state:    Nothing was built.\n"
            "  to do:    git config core.symlinks true && git checkout -- flashckpt trainer; "
            "unpack a zip with unzip; or install a wheel or the source distribution"
        )


class LinkingSdist(sdist):
    """Writes links as links: the tests and their tools run in the folder that comes out."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Leave out what lies behind links, then make these."""
        links = [path for top in TOPS for path in Path(top).iterdir() if path.is_symlink()]
        behind = tuple(f"{link}/" for link in links)
        super().make_release_tree(base_dir, [name for name in files if not name.startswith(behind)])
        for link in links:
            made = Path(base_dir, link)
            shutil.rmtree(made, ignore_errors=True)
            made.symlink_to(link.readlink())


refuse_without_links()
native = Extension(
    "flashckpt.native._copy",
    sources=sorted(str(path) for path in FOLDER.glob("*.c")),
    depends=sorted(str(path) for path in FOLDER.glob("*.h")),
    define_macros=[("Py_LIMITED_API", "0x030A0000")],
    extra_compile_args=["-std=c11", "-O3", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wshadow"],
    py_limited_api=True,
    optional=True,
)
setup(
    cmdclass={"sdist": LinkingSdist},
    ext_modules=[native] if IS_NATIVE else [],
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if IS_NATIVE else {},
)
