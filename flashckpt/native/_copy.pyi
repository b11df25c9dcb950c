from typing import Any

def levels() -> tuple[str, ...]: ...
def kinds() -> int: ...
def run(
    level: int,
    rows: int,
    count: int,
    first: int,
    digests: int,
    digest_count: int,
    next_row: int,
    kinds: int,
    figures: int,
    check: bool,
    /,
) -> tuple[int, int, int]: ...
def join(
    level: int,
    rows: int,
    count: int,
    first: int,
    digests: int,
    digest_count: int,
    next_row: int,
    kinds: int,
    figures: int,
    check: bool,
    /,
) -> int: ...
def guard(address: int, nbytes: int, /) -> int: ...
def unguard(number: int, /) -> None: ...
def is_lost(number: int, /) -> bool: ...
def same_members(dicts: list[Any], kind: type, lists: list[Any], held: list[Any], /) -> bool | None: ...
def read_counters(objects: list[Any], to_body: int, to_counter: int, to_value: int, out: int, /) -> bool: ...
