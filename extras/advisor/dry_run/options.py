"""The options of `--dry-run`. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from flashckpt.errors import ConfigError

RANKS_PER_NODE = 8
GIB = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class DryRunOptions:
    """What is asked of a dry run.

    Attributes:
        world: Ranks.
        ranks_per_node: Of which one node's memory holds the snapshots.
        device_memory: Bytes of one device; 0: not compared.
        node_memory: Bytes of one node's memory that snapshots may take; 0: not compared.
        json: Whether to print JSON.
    """

    world: int
    ranks_per_node: int = RANKS_PER_NODE
    device_memory: int = 0
    node_memory: int = 0
    json: bool = False


def take_options(words: list[str]) -> DryRunOptions | None:
    """Remove `--dry-run` and its options from a command line and return them; None where it is no dry run.

    Raises:
        ConfigError: `--world` is not there, or a number is none or below 1; or such an option without `--dry-run`.
    """
    found = {name: _take(words, name) for name in ("--world", "--ranks-per-node", "--device-memory", "--node-memory")}
    as_json, is_dry = _flag(words, "--json"), _flag(words, "--dry-run")
    if not is_dry:
        stray = [name for name, text in found.items() if text is not None] + ["--json"] * as_json
        if stray:
            raise _wrong(f"{stray[0]} has no effect without --dry-run", stray[0], "--dry-run --world N")
        return None
    if found["--world"] is None:
        raise _wrong("--dry-run needs the number of ranks", "no --world", "--dry-run --world N")
    world = _number("--world", found["--world"])
    per_node = _number("--ranks-per-node", found["--ranks-per-node"] or str(min(world, RANKS_PER_NODE)))
    device, node = (_number(name, found[name] or "0", least=0) for name in ("--device-memory", "--node-memory"))
    return DryRunOptions(
        world=world, ranks_per_node=per_node, device_memory=device * GIB, node_memory=node * GIB, json=as_json
    )


def _flag(words: list[str], name: str) -> bool:
    if name not in words:
        return False
    words.remove(name)
    return True


def _take(words: list[str], name: str) -> str | None:
    for i, word in enumerate(words):
        if word.startswith(f"{name}="):
            return words.pop(i).partition("=")[2]
        if word == name:
            if i + 1 == len(words) or words[i + 1].startswith("--"):
                raise _wrong(f"{name} has no value", name, f"{name} N")
            del words[i]
            return words.pop(i)
    return None


def _number(name: str, text: str, *, least: int = 1) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 9 or int(text) < least:
        raise _wrong(f"{name} is not a number of {least} or more", repr(text), f"{name} N, a whole number")
    return int(text)


def _wrong(problem: str, found: str, expected: str) -> ConfigError:
    return ConfigError(
        problem, found=found, expected=expected, state="Nothing was started.", remedy="see --help, --dry-run"
    )
