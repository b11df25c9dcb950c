"""Prepares real text as byte tokens: the Python library on this machine, or the user's own files.

The result is a folder with one `<set>.bin` (uint8 tokens) per channel and split, and `index.json`, which is
written last: a folder without it does not exist. Torch-free.
"""

from __future__ import annotations

import ast
import fcntl
import hashlib
import importlib
import json
import os
import sysconfig
import warnings
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from flashckpt.errors import DataError
from flashckpt.faults import crash_point
from flashckpt.sampler.datasets.contents import HEAD_BYTES, decoded, refuse_no_text
from flashckpt.trainer.data.prepared import index_of_corpus

VERSION = 1
STDLIB = "stdlib"
CHANNELS = ("code", "doc", "prose")
MAX_STDLIB_FILES = 400


def prepare_corpus(folder: str | os.PathLike[str], source: Sequence[str], holdout_every: int) -> dict[str, Any]:
    """Return the index of the prepared corpus in `folder`, preparing it if necessary.

    Safe to call from many processes at once: one prepares under a file lock, the others wait for it.

    Args:
        folder: Folder of the tokens.
        source: "stdlib", or file patterns (each pattern's stem-less parent is no channel; one channel "text").
        holdout_every: About one file in so many, chosen by its digest, is held out for evaluation.

    Raises:
        DataError: no file matches, the files hold no text, or the folder holds another source.
    """
    path = Path(folder)
    recipe = {"version": VERSION, "source": list(source), "holdout_every": holdout_every}
    try:
        path.mkdir(parents=True, exist_ok=True)
        with (path / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            index = index_of_corpus(path)
            if index is None or index["recipe"] != recipe:
                index = _write_corpus(path, recipe, source, holdout_every)
            return index
    except OSError as error:
        raise DataError(
            f"the data folder {path} cannot be written",
            found=error.strerror or str(error),
            expected="a writable folder with some 20 MB of room",
            remedy="set data.folder to another place",
        ) from error


def _write_corpus(path: Path, recipe: dict[str, Any], source: Sequence[str], holdout_every: int) -> dict[str, Any]:
    (path / "index.json").unlink(missing_ok=True)
    texts = stdlib_texts() if list(source) == [STDLIB] else _file_texts(source)
    writers: dict[str, _Set] = {}
    try:
        for channel, text in texts:
            data = text.encode("utf-8", "replace")
            if data.strip():
                split = "held" if is_held_out(data, holdout_every) else "train"
                name = f"{split}.{channel}.bin"
                if name not in writers:
                    writers[name] = _Set(path / name, channel, split)
                writers[name].add(data)
    finally:
        sets = {name: writer.close() for name, writer in sorted(writers.items())}
    if not any(entry["split"] == "train" for entry in sets.values()):
        raise DataError(
            "the corpus is empty",
            found=f"no text in {', '.join(source)}",
            expected="files with text in them",
            state="Nothing was prepared.",
            remedy='set data.source to ["stdlib"] or to patterns of your own files',
        )
    index = {"recipe": recipe, "sets": sets, "fingerprint": _fingerprint(sets)}
    crash_point("corpus.before-index")
    temporary = path / "index.json.tmp"
    temporary.write_text(json.dumps(index, indent=1))
    temporary.replace(path / "index.json")
    return index


class _Set:
    """One channel of one split while it is written: tokens are bytes, files end in a zero byte."""

    def __init__(self, path: Path, channel: str, split: str) -> None:
        self.channel, self.split, self.tokens = channel, split, 0
        self._file: IO[bytes] = path.open("wb")
        self._digest = hashlib.sha256()

    def add(self, data: bytes) -> None:
        data += b"\0"
        self._file.write(data)
        self._digest.update(data)
        self.tokens += len(data)

    def close(self) -> dict[str, Any]:
        self._file.flush()
        os.fsync(self._file.fileno())  # the index that refers to these bytes is written after them
        self._file.close()
        return {"channel": self.channel, "split": self.split, "tokens": self.tokens, "sha256": self._digest.hexdigest()}


def _fingerprint(sets: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(sets, sort_keys=True).encode()).hexdigest()


def is_held_out(data: bytes, every: int) -> bool:
    """Return whether a document belongs to the evaluation: about one in `every`, by its content alone."""
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little") % every == 0


def stdlib_texts(wanted: Collection[str] = CHANNELS) -> Iterator[tuple[str, str]]:
    """Yield (channel, text) of the wanted ones: sources (code), their docstrings (doc), the language reference (prose)."""
    if "code" in wanted or "doc" in wanted:
        yield from ((channel, text) for channel, text in _library_texts("doc" in wanted) if channel in wanted)
    if "prose" in wanted:
        topics = importlib.import_module("pydoc_data.topics").topics
        for name in sorted(topics):
            yield "prose", topics[name]


def _library_texts(with_docs: bool) -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "site-packages", "dist-packages", "idle_test", "pydoc_data", "lib2to3", "__pycache__"}
    files = (p for p in sorted(root.rglob("*.py")) if not skipped & set(p.relative_to(root).parts))
    for number, file in enumerate(files):
        if number == MAX_STDLIB_FILES:
            break
        text = file.read_text(encoding="utf-8", errors="replace")
        yield "code", text
        if with_docs and (docs := _docstrings(text)):
            yield "doc", docs


def _docstrings(text: str) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # warnings about the library's own invalid escapes are of no use to the user
            tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return ""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
    return "\n\n".join(doc for doc in found if doc)


def _file_texts(patterns: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the user's files; the channel is the pattern's label (`label=pattern`), else "text"."""
    for pattern in patterns:
        label, equals, glob = pattern.partition("=")
        channel, glob = (label, glob) if equals else ("text", pattern)
        base = Path(glob)
        anchor = Path(base.anchor) if base.is_absolute() else Path()
        relative = str(base.relative_to(base.anchor)) if base.is_absolute() else glob
        files = sorted(file for file in anchor.glob(relative) if file.is_file())
        if not files:
            raise DataError(
                f"no file matches {glob!r}",
                found="0 files",
                expected="text files",
                state="Nothing was prepared.",
                remedy="correct data.source; patterns are relative to the folder the run starts in",
            )
        for file in files:
            data = file.read_bytes()
            refuse_no_text(str(file), data[:HEAD_BYTES])
            yield channel, decoded(data, str(file))
