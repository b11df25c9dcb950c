"""Damaged bytes for every decoder: mutations of good ones, as they are and with their digests set right again.

A target decodes bytes and then uses what came out as readers do. Only FlashckptError may come out of it.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from flashckpt.errors import FlashckptError

Decode = Callable[[bytes], object]
INTERESTING: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2, 255, 2**31, 2**32 - 1, 2**53, 2**62, 2**63 - 1, -(2**63), 2**64 - 1, 1.5, float("nan"), float("inf"),
    "", "..", "/etc/passwd", "a\0b", "x" * 300, "float32", b"", b"\0" * 8, b"\xff" * 64, [], [[]], [1], [1, 2, 3], {}, {"a": 1},
    {1: 2}, msgpack.ExtType(1, b"\x90"), msgpack.ExtType(1, b"\x01"), msgpack.ExtType(2, b""), msgpack.ExtType(9, b"?"),
    msgpack.Timestamp(1, 2),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Target:
    """One decoder.

    Attributes:
        seeds: Good bytes; each decodes.
        decode: Decodes them and uses what comes out.
        reseal: Returns bytes with their digests set right; None where there are none.
        tree: (bytes -> nested values, nested values -> sealed bytes) to change single fields.
    """

    seeds: Sequence[bytes]
    decode: Decode
    reseal: Callable[[bytes], bytes] | None = None
    tree: tuple[Callable[[bytes], Any], Callable[[Any], bytes]] | None = None


def mutated(rng: random.Random, raw: bytes) -> bytes:
    """Return `raw` with one to four small damages."""
    data = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(7)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(data):
            data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xC1, 0xFF, rng.randrange(256)))
        elif kind == 2:
            del data[at : at + rng.choice((1, 2, 8, 64, 1 << 20))]
        elif kind == 3:
            data[at:at] = rng.randbytes(rng.choice((1, 2, 8, 64)))
        elif kind == 4:
            number = struct.pack(rng.choice("<>") + "Q", rng.choice((0, 1, 2**31, 2**32, 2**63, 2**64 - 1)))
            width = rng.choice((1, 2, 4, 8))
            data[at : at + width] = number[:width]
        elif kind == 5:
            end = rng.randrange(len(data) + 1)
            data[at:at] = data[min(at, end) : max(at, end)][:256]
        else:
            data[at : at + 8] = bytes(8)
    return bytes(data)


def changed(rng: random.Random, tree: Any) -> Any:
    """Return a tree with one node replaced, removed, doubled or wrapped."""
    if isinstance(tree, dict) and tree and rng.random() < 0.9:
        key = rng.choice(list(tree))
        action = rng.randrange(12)
        rest = {k: v for k, v in tree.items() if k != key}
        if action == 0:
            return rest
        if action == 1:
            return {**rest, rng.choice((0, "?", b"k", -1)): tree[key]}
        return {**tree, key: changed(rng, tree[key])}
    if isinstance(tree, (list, tuple)) and tree and rng.random() < 0.85:
        at = rng.randrange(len(tree))
        action = rng.randrange(8)
        items = list(tree)
        if action == 0:
            del items[at]
        elif action == 1:
            items.insert(at, items[at])
        else:
            items[at] = changed(rng, items[at])
        return items
    return _replaced(rng, tree)


def _replaced(rng: random.Random, leaf: Any) -> Any:
    if isinstance(leaf, bytes) and leaf and rng.random() < 0.8:
        if rng.random() < 0.5 and len(leaf) % 8 == 0:
            at = 8 * rng.randrange(len(leaf) // 8)
            return (
                leaf[:at] + struct.pack("<q", rng.choice((-1, 0, 1, 7, 4096, 2**31, 2**62, 2**63 - 1))) + leaf[at + 8 :]
            )
        return mutated(rng, leaf)
    if type(leaf) is int and rng.random() < 0.5:
        return leaf + rng.choice((-1, 1, 2**32))
    if rng.random() < 0.1:
        for _ in range(rng.choice((3, 70, 600))):
            leaf = [leaf]
        return leaf
    if rng.random() < 0.05:
        return deep_tuple(rng.choice((10, 63, 70, 300, 2000)))
    return rng.choice(INTERESTING)


def deep_tuple(depth: int) -> msgpack.ExtType:
    """Return tuples within one another, as our values hold them."""
    data = b"\x90"
    for _ in range(depth):
        data = msgpack.packb([msgpack.ExtType(1, data)])
    return msgpack.ExtType(1, data)


def attempt(target: Target, raw: bytes) -> bool:
    """Decode; return whether it was accepted. Anything but FlashckptError is raised."""
    try:
        target.decode(raw)
    except FlashckptError:
        return False
    return True


def fuzz(target: Target, seed: int, rounds: int, keep_on: Callable[[], bool] = lambda: True) -> dict[str, int]:
    """Try `rounds` damages of each kind while `keep_on()`; return how many were tried and accepted."""
    rng = random.Random(seed)
    counts = {"tried": 0, "accepted": 0}
    for number in range(rounds):
        if not keep_on():
            break
        good = rng.choice(target.seeds)
        cases = [mutated(rng, good)]
        if target.reseal is not None:
            cases.append(target.reseal(mutated(rng, good)))
        if target.tree is not None:
            unpack, pack = target.tree
            tree = unpack(good)
            for _ in range(rng.choice((1, 1, 2))):
                tree = changed(rng, tree)
            try:
                cases.append(pack(tree))
            except (ValueError, TypeError, OverflowError, RecursionError):  # what no writer could write either
                pass
        for raw in cases:
            counts["tried"] += 1
            try:
                counts["accepted"] += attempt(target, raw)
            except BaseException as error:
                error.args = (*error.args, f"seed {seed}, round {number}: {raw[:400].hex()}")
                raise
    return counts
