"""The folder of a dlrun agent: what its ranks leave there for it (job, permanent error, display), and their key. Torch-free.

The key is derived from the job secret, which the ranks do not have: dlrun keeps that to its agents, and leaves the key in a
file of its folder that this user alone can read. No key is ever sent. Without a secret there is none (b"").
"""

from __future__ import annotations

import contextlib
import hmac
import os
from collections.abc import Mapping
from pathlib import Path

from flashckpt.environment import Environment, env
from flashckpt.errors import FINAL_CODES
from flashckpt.shm.lease import Lease

LOCK = "lock"
"""File in the folder whose byte 0 the agent holds as long as it runs."""

LATE = "late-variable"
"""File in the folder in which a rank names a variable that its script changes too late for a standby process."""


def agent_folder() -> Path | None:
    """Return the folder of the agent above this process, or None without dlrun.

    None too where the agent that the environment names has ended: the variable was inherited, by a shell or an image.
    """
    folder = env.FLASHCKPT_AGENT_DIR
    return Path(folder) if folder and _is_held(Path(folder)) else None


def ended_agent() -> str:
    """Return how the environment names an agent that is not running; "" where it names none, or one that runs."""
    folder = env.FLASHCKPT_AGENT_DIR
    return f"FLASHCKPT_AGENT_DIR={folder}" if folder and not _is_held(Path(folder)) else ""


def _is_held(folder: Path) -> bool:
    try:
        lease = Lease(folder / LOCK)
    except OSError:
        return False
    try:
        return lease.held_by_other(0)
    except OSError:
        return True  # a file system without locks: the agent is believed
    finally:
        lease.close()


def write_job(folder: Path, job: Path) -> None:
    """Record the job directory of the ranks below an agent; the same for all of them. They know the job's newest generation."""
    _replace(folder / "job", str(job))
    (folder / "missed").unlink(missing_ok=True)


def write_opening(folder: Path, job: Path) -> None:
    """Record where ranks are about to begin a job: its persister starts beside their restore. They do not know the job yet."""
    _replace(folder / "opening", str(job))


def read_job(folder: Path, name: str = "job") -> Path | None:
    """Return the job directory that a rank recorded, or None; with "opening" that of `write_opening`.

    Raises:
        OSError: it cannot be read, though it may be there.
    """
    try:
        text = (folder / name).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    return Path(text) if text else None


def note_missed(folder: Path) -> None:
    """Record that the job ran without this node meanwhile, until ranks have begun here again."""
    (folder / "missed").touch()


def has_missed(folder: Path) -> bool:
    """Return whether the job ran without this node since ranks last began here."""
    return (folder / "missed").exists()


def write_key(folder: Path, key: bytes) -> None:
    """Leave the key of the ranks below an agent; nobody else can read it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    with os.fdopen(os.open(folder / "key", flags, 0o600), "wb") as file:
        file.write(key)


def read_key(folder: Path) -> bytes:
    """Return the key of the ranks below an agent; b"" where it has left none."""
    try:
        return (folder / "key").read_bytes()
    except FileNotFoundError:
        return b""


def write_permanent_error(folder: Path, exit_code: int) -> None:
    """Record that a restart cannot fix an error, before the agent kills the rank that has it; other errors are none."""
    if exit_code in FINAL_CODES:
        _replace(folder / "refused", str(exit_code))


def read_permanent_error(folder: Path) -> int:
    """Return the exit code of a rank's permanent error, 0 if there is none."""
    try:
        return int((folder / "refused").read_text(encoding="utf-8") or "0")
    except (OSError, ValueError):
        return 0


def forget_permanent_error(folder: Path) -> None:
    """Remove the record: the next generation may have another size, which the error was about."""
    (folder / "refused").unlink(missing_ok=True)


def late_variable(folder: Path) -> str:
    """Return the variable that a rank names in LATE, or ""."""
    try:
        return (folder / LATE).read_text(encoding="utf-8")
    except OSError:
        return ""


def note_waiting(folder: Path) -> None:
    """Record that a rank waits for storage just now: it does not hang."""
    (folder / "waiting").touch()


def waited_at(folder: Path) -> float:
    """Return when a rank last recorded that it waits, 0 if none did."""
    try:
        return (folder / "waiting").stat().st_mtime
    except OSError:
        return 0.0


def note_bad_numbers(folder: Path, step: int, *, is_here: bool) -> None:
    """Record that numbers became bad in a step on one node alone: on this one, or on another, which clears this one."""
    with (folder / "bad-numbers").open("a" if is_here else "w", encoding="utf-8") as file:
        file.write(f"{step}\n" if is_here else "")


def bad_numbers(folder: Path) -> list[int]:
    """Return the steps, each once, in which numbers became bad on this node alone, if they did so on no other since."""
    try:
        return sorted({int(step) for step in (folder / "bad-numbers").read_text(encoding="utf-8").split()})
    except OSError:
        return []


def note_suspect(folder: Path, first: int, last: int) -> None:
    """Record that numbers on this rank became bad, or grew as by a flipped bit, in one of these steps of this start; 0, 0: not any more."""
    with (folder / "suspect").open("a", encoding="utf-8") as file:
        file.write(f"{env.FLASHCKPT_RESTART} {env.RANK} {first} {last}\n")


def bad_steps(folder: Path) -> tuple[int, int] | None:
    """Return the steps in one of which numbers here became bad first, as far as the ranks know; None where none did."""
    try:
        lines = [line.split() for line in (folder / "suspect").read_text(encoding="utf-8").splitlines()]
        found = [(int(first), int(last)) for *_, first, last in lines]
    except (OSError, ValueError):
        return None
    return min((steps for steps in found if steps[1]), key=lambda steps: steps[1], default=None)


def end_suspects(folder: Path, start: int, restored: int) -> None:
    """Drop what was noted and holds no more: numbers are good again, or the start that has ended went back to before it.

    `start` is its number, `restored` the step that it began with; below 0 it did not come so far.
    """
    path = folder / "suspect"
    with contextlib.suppress(OSError, ValueError):  # a line cut short
        left: list[list[int]] = []
        for line in path.read_text(encoding="utf-8").splitlines():
            begun, rank, first, last = map(int, line.split())
            if not last:
                left = [one for one in left if one[1] != rank]
            elif begun == start or restored < 0 or first <= restored:
                left.append([begun, rank, first, last])
        _replace(path, "".join("{} {} {} {}\n".format(*one) for one in left))


def note_display(folder: Path) -> None:
    """Record that a rank draws on the terminal: whoever writes there next erases what is below the cursor first."""
    (folder / "display").touch()


def has_display(folder: Path) -> bool:
    """Return whether a rank draws on the terminal."""
    return (folder / "display").exists()


def forget_display(folder: Path) -> bool:
    """Remove the record after the ranks have ended; return whether there was one."""
    try:
        (folder / "display").unlink()
    except OSError:
        return False
    return True


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def derived(secret: bytes, purpose: str) -> bytes:
    """Return the key for one purpose, from which neither the secret nor another purpose's key can be found; b"" of none."""
    return hmac.digest(secret, b"flashckpt " + purpose.encode(), "sha256") if secret else b""


def ranks_key(environment: Mapping[str, str] = os.environ) -> bytes:
    """Return the key of this rank's job: of its agent, or of FLASHCKPT_JOB_SECRET under another launcher; b"" if there is none.

    Raises:
        OSError: the agent's file cannot be read.
        ConfigError: the secret is too short.
    """
    if (folder := agent_folder()) is not None:
        return read_key(folder)
    return derived(Environment(environment).FLASHCKPT_JOB_SECRET.encode(), "ranks")


def link_key(ranks: bytes, session: bytes) -> bytes:
    """Return the key by which persisters sign, from the ranks' key and the one that rank 0 has drawn for this session.

    The session's travels between the ranks in clear text: who has seen it there still lacks the ranks'.
    """
    return hmac.digest(ranks, b"replica links " + session, "sha256") if ranks else session
