"""Bugs planted into the product's own lines, which the simulation must find: `python -m simulation.mutants`.

Each replacement (`bugs`) is made while the module is imported, in a process of its own.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from importlib.machinery import SourceFileLoader
from itertools import chain
from multiprocessing import get_context
from multiprocessing.connection import wait
from typing import Any

from support.paths import ROOT

from simulation.bugs import DEFENDED, HUNTS, MUTANTS, Hunt, Mutant
from simulation.later_bugs import LATER, LATER_HUNTS
from simulation.more_bugs import MORE, MORE_HUNTS

BUSY: dict[str, object] = {"step_s": 1.0, "persist_every": 2, "faults_s": 40.0}
"""A job in which much happens in little time: many seeds of it are run sooner than one long one."""
LONGER = BUSY | {"faults_s": 150.0}


def mutated(mutant: Mutant) -> str:
    """Return the text of its file with the bug in it."""
    text = (ROOT / mutant.file).read_text()
    if text.count(mutant.before) != 1:
        raise ValueError(f"{mutant.name}: {text.count(mutant.before)} such places in {mutant.file}")
    return text.replace(mutant.before, mutant.after)


def plant(mutant: Mutant) -> None:
    """Have the module that is imported later carry the bug."""
    text, original = mutated(mutant), SourceFileLoader.get_code
    path = (ROOT / mutant.file).resolve()

    def get_code(self: SourceFileLoader, name: str) -> Any:
        if os.path.realpath(self.path) == str(path):
            return compile(text, self.path, "exec")
        return original(self, name)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign, assignment]


def stories(mutant: Mutant, seeds: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the stories in which a bug is sought: the named ones, then new ones; these first where it is known what to look for."""
    from simulation.plan import draw
    from simulation.seeds import SEEDS

    sought = next(
        (one for word, one in {**LATER_HUNTS, **MORE_HUNTS, **HUNTS}.items() if word in mutant.name), Hunt(())
    )
    kinds = ({**LONGER, **sought.fixed}, {**BUSY, **sought.fixed})
    new = ((str(seed), (seed, *draw(seed, sought.kinds, **kinds[seed % 2]))) for seed in range(1, seeds + 1))
    known = ((f"named {at}", (one.seed, one.setup, one.faults)) for at, one in enumerate(SEEDS, start=1))
    return chain(new, known) if sought.kinds else chain(known, new)


def hunt(mutant: Mutant, seeds: int, seconds: float, control: str = "") -> str:
    """Plant it here, and return what found it; with `control` only what that story breaks without it."""
    if not control:
        plant(mutant)
    from simulation.run import simulate

    end, name = time.process_time() + seconds, ""
    for name, story in stories(mutant, seeds):
        if control and name != control:
            continue
        try:
            outcome = simulate(*story)
        except BaseException as error:  # noqa: BLE001 -- a crash of the product's loop is a find, too
            return f"{name}\t{type(error).__name__}: {error}"
        if outcome.rule:
            return f"{name}\t{outcome.problem}"
        if control or time.process_time() > end:
            break
    return f"-\tnot in the seeds up to {name}"


def side_by_side(hunted: Sequence[Mutant], workers: int, **limits: float) -> Iterator[tuple[Mutant, str]]:
    """Yield each mutant with the answer of `hunt`, from a process of its own, which may die of the bug.

    What was found is run once more without the bug: a story that breaks a rule then, too, has found nothing.
    """
    context, todo = get_context("fork"), deque((one, "") for one in hunted)
    running: dict[Any, tuple[Mutant, str, Any]] = {}
    while todo or running:
        while todo and len(running) < workers:
            mutant, found = todo.popleft()
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_answer, args=(there, mutant, found.partition("\t")[0], limits))
            process.start()
            there.close()
            running[here] = mutant, found, process
        said: Any
        for said in wait([*running]):
            mutant, found, process = running.pop(said)
            try:
                answer = said.recv_bytes().decode()
            except EOFError:
                answer = "?\tthe process died"
            process.join()
            if found:
                yield mutant, found if answer.startswith("-") else f"-\tthe same without it: {answer}"
            elif answer[0] in "-?":
                yield mutant, answer
            else:
                todo.appendleft((mutant, answer))


def _answer(there: Any, mutant: Mutant, control: str, limits: dict[str, Any]) -> None:
    there.send_bytes(hunt(mutant, control=control, **limits).encode())


def main(arguments: list[str]) -> int:
    """Hunt all of them, or those whose name contains a word; the exit code is the number of those that got away."""
    parser = argparse.ArgumentParser(prog="simulation.mutants", description=__doc__)
    parser.add_argument("--new", action="store_true", help="those of `more_bugs` and `later_bugs` alone")
    parser.add_argument("--only", default=[""], nargs="+", help="parts of names")
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=1e9, help="of a processor, for each")
    parser.add_argument("--workers", type=int, default=1, help="processes side by side")
    chosen = parser.parse_args(arguments)
    import torch  # noqa: F401 -- once, before the processes fork: it takes longer than many seeds

    hunted = [
        one for one in ([] if chosen.new else MUTANTS) + MORE + LATER if any(part in one.name for part in chosen.only)
    ]
    missed, found = 0, 0
    limits = {"seeds": chosen.seeds, "seconds": chosen.seconds}
    for mutant, answer in side_by_side(hunted, chosen.workers, **limits):
        seed, _, text = answer.partition("\t")
        found += seed != "-"
        missed += seed == "-" and mutant.name not in DEFENDED
        text = f"{text}; {DEFENDED[mutant.name]}" if seed == "-" and mutant.name in DEFENDED else text
        sys.stdout.write(f"{mutant.name:55} seed {seed:>8}  {text.splitlines()[0][:110]}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{found} of {len(hunted)} were found; of the others {missed} are not known to be harmless\n")
    return missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
