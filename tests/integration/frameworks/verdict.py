"""What the lives of a case show: exact, refused in time, or wrong. Pure."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any

from integration.frameworks.run import KILLED_AT, LAST, Life, Lives

_IN_TIME = ("track", "start", "training of step 1", "step(1)")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The outcome of a case.

    Attributes:
        outcome: "exact", "refused" or "wrong".
        message: Of a refusal: its class and first line. Of what is wrong: what and where.
        stage: Where it was refused.
        text: A traceback or the end of the output, where there is one.
    """

    outcome: str
    message: str = ""
    stage: str = ""
    text: str = ""


def judge(lives: Lives, *, from_rank_0: str = "") -> Verdict:
    """Return what the lives of a case show; `from_rank_0` as in `Case`."""
    if found := _broken(lives.unbroken, "unbroken", killed=False):
        return found
    errors = lives.killed.all("error")
    if errors and all(one["known"] and one["stage"] in _IN_TIME for one in errors):
        first = errors[0]
        return Verdict(outcome="refused", stage=first["stage"], message=f"{first['error']}: {first['problem']}")
    for name, life in {"killed": lives.killed, **lives.restarted}.items():
        found = _broken(life, name, killed=name in ("killed", "memory")) or _different(
            lives.unbroken, life, name, from_rank_0
        )
        if found is not None:
            return found
    return Verdict(outcome="exact")


def _broken(life: Life, name: str, *, killed: bool) -> Verdict | None:
    """Return what is wrong with a life's end."""
    for one in life.all("error"):
        return _wrong(f"{name} life, {one['stage']}: {one['error']}: {one['problem'].splitlines()[0]}", one["text"])
    for line in life.all("no_snapshot"):
        return _wrong(f"{name} life: the snapshot of step {line['no_snapshot']} was never complete", life.output)
    for number in life.ends:
        if number != (signal.SIGKILL if killed else 0):
            ended = signal.Signals(number).name if number else "nothing"
            return _wrong(f"{name} life: ended by {ended}", life.output)
    return None


def _different(unbroken: Life, life: Life, name: str, from_rank_0: str) -> Verdict | None:
    """Return the first difference between a life and the unbroken one, which is as long or longer."""
    expected_first = {"killed": 0, "memory": KILLED_AT, "storage": LAST, "memory again": LAST}[name]
    for rank in range(len(life.lines)):
        steps = {line["step"]: line for line in unbroken.of(rank, "step")}
        (restored,) = life.of(rank, "restored")
        if restored["restored"] != expected_first:
            return _wrong(f"{name} life: restored step {restored['restored']} instead of {expected_first}", life.output)
        if expected_first and {tier for tier, count in restored["tiers"].items() if count} != {
            "storage" if name == "storage" else "memory"
        }:
            return _wrong(f"{name} life: read from {restored['tiers']}")
        if expected_first:
            expected = dict(steps[expected_first]["state"])
            first = next(line["state"] for line in unbroken.of(0, "step") if line["step"] == expected_first)
            for path in (path for path in expected if from_rank_0 and from_rank_0 in path):
                if restored["state"].get(path) == first[path]:
                    expected[path] = first[path]
            if found := difference(expected, restored["state"]):
                return _wrong(f"{name} life, rank {rank}, as restored at step {expected_first}: {found}")
        for line in life.of(rank, "step"):
            found = difference(steps[line["step"]]["state"], line["state"])
            if line["loss"] != steps[line["step"]]["loss"]:
                found = f"the loss is {line['loss']} instead of {steps[line['step']]['loss']}; {found}"
            if found:
                return _wrong(f"{name} life, rank {rank}, after step {line['step']}: {found}")
    return None


def difference(expected: dict[str, Any], found: dict[str, Any]) -> str:
    """Return how two fingerprints differ; "" where they do not."""
    missing = [path for path in expected if path not in found]
    more = [path for path in found if path not in expected]
    other = [path for path in expected if path in found and found[path] != expected[path]]
    parts = []
    for what, paths in (("missing", missing), ("too much", more), ("different", other)):
        if paths:
            dots = ", ..." if len(paths) > 3 else ""
            parts.append(f"{len(paths)} of {len(expected)} {what}: {', '.join(paths[:3])}{dots}")
    return "; ".join(parts)


def _wrong(message: str, text: str = "") -> Verdict:
    return Verdict(outcome="wrong", message=message, text=text[-4000:])
