"""A rank that is counted in a separate process: torch keeps plans by mesh, and those of one rank are wrong for another."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import traceback
from typing import Any

from flashckpt import errors
from flashckpt.errors import FlashckptError
from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.dry_run.held import RankHoldings, held_by
from flashckpt.trainer.parallel.layout import Layout

_PARTS = ("problem", "found", "expected", "state", "remedy")


def held_in_child(config: RunConfig, layout: Layout, rank: int) -> RankHoldings:
    """Return what a rank holds, as `held_by`, worked out by a forked process.

    Raises:
        FlashckptError: As building the rank raises it.
    """
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _answer(writer, config, layout, rank)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        raw = pipe.read()
    os.waitpid(pid, 0)
    answer: dict[str, Any] = json.loads(raw) if raw else {}
    if "held" in answer:
        return RankHoldings(**answer["held"])
    if "error" in answer:
        raise _same(answer)
    raise RuntimeError(f"rank {rank} could not be built; its process has said why")


def _answer(writer: int, config: RunConfig, layout: Layout, rank: int) -> None:
    """Write the answer, and end this process without what its parent would do at exit."""
    code = 1
    try:
        try:
            answer: dict[str, Any] = {"held": dataclasses.asdict(held_by(config, layout, rank))}
        except FlashckptError as error:
            answer = {"error": type(error).__name__, **{part: getattr(error, part) for part in _PARTS}}
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(json.dumps(answer).encode())
        code = 0
    except BaseException:  # noqa: BLE001 -- nothing may return into a copy of the parent
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _same(answer: dict[str, Any]) -> FlashckptError:
    kind = getattr(errors, answer["error"], FlashckptError)
    return kind(answer["problem"], **{part: answer[part] for part in _PARTS[1:]})
