"""The simulation is deterministic, sees planted bugs, and finds no more what its seeds once found.

It takes the place of the machine in the product's modules, so that each test runs in a child process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest
from support.paths import ROOT, TESTS

from simulation.bugs import DEFENDED, HUNTS, MUTANTS
from simulation.later_bugs import LATER, LATER_HUNTS
from simulation.more_bugs import MORE, MORE_HUNTS
from simulation.mutants import mutated


def in_a_child(work: Callable[[], Any]) -> Any:
    """Return what some work returns in a process of its own."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.write(write, json.dumps(work()).encode())
        except BaseException:  # noqa: BLE001 -- it is all that is seen of it
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    return json.loads(text)


@pytest.mark.parametrize("mutant", [*MUTANTS, *MORE, *LATER], ids=lambda mutant: mutant.name)
def test_every_planted_bug_has_its_place(mutant: Any) -> None:
    assert len(MUTANTS) >= 40
    assert DEFENDED.keys() < {one.name for one in [*MUTANTS, *MORE]}
    assert all(any(word in one.name for one in MUTANTS) for word in HUNTS)
    assert all(any(word in one.name for one in MORE) for word in MORE_HUNTS)
    assert all(any(word in one.name for one in LATER) for word in LATER_HUNTS)
    compile(mutated(mutant), mutant.file, "exec")


SEEN = {
    "the header says WRITING in neither copy": "what memory calls whole is whole",
    "a suspect snapshot is preferred": "a restore prefers what is clean",
    "rolled back: off by one": "nothing that was rolled back is restored",
    "a round that was missed is forgotten": "a restore takes the newest",
    "the lease is not waited for": "a commit is left to who has its lease",
    "a keep mark that comes late is not seen": "nothing that retention protects is deleted",
    "a job that ends does not wait for its last commit": "what a job ends with is on the root",
    "a claim has no parent": "a claim has its parent",
    "slots stay pinned while storage fails": "memory goes on without the root",
    "a lease is never renewed": "who commits and lives is left to it",
    "a reader that comes late keeps nothing": "what is read stays while it is read",
    "room is made of what is kept": "nothing that retention protects is deleted",
}
"""Planted bugs, each of which another fault and another rule make visible, within a few seeds."""


@pytest.mark.timeout(400)  # a minute of computing, on busy cores several
def test_planted_bugs_are_found_by_the_rule_that_is_for_them() -> None:
    command = [sys.executable, "-m", "simulation.mutants", "--seeds", "12", "--only", *SEEN]
    place = {**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{ROOT}"}
    ended = subprocess.run(command, env=place, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = {name: line for line in ended.stdout.splitlines() for name in SEEN if line.startswith(name)}
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert lines.keys() == SEEN.keys()
    assert [name for name, rule in SEEN.items() if f"  {rule}: " not in lines[name]] == []


def _calm(**changes: Any) -> Any:
    from simulation.job import Setup
    from simulation.plan import Fault
    from simulation.run import simulate

    setup = Setup(**{"nodes": 2, "persist_every": 3, "faults_s": 40.0, **changes})
    outcome = simulate(3, setup, [Fault(25.0, "kill rank", 1)])
    return [outcome.rule, outcome.story, outcome.counts]


def test_a_seed_is_one_story() -> None:
    first, second = in_a_child(lambda: [_calm(), _calm()])
    assert first == second
    rule, story, counts = first
    assert rule == ""
    assert counts["commits"] > 1
    assert counts["starts"] == 2
    assert any(what.startswith("generation 2 begins with step") for _, _, what in story)


def _with_a_bug() -> Any:
    from simulation.run import prepare

    prepare()
    from flashckpt.snapshot import segments

    segments.__dict__["choose_slot"] = lambda headers, **_: 0
    return _calm()


def test_a_slot_that_is_written_too_early_is_seen() -> None:
    assert in_a_child(_with_a_bug)[0] == "M1"


def _named() -> Any:
    from simulation.run import simulate
    from simulation.seeds import SEEDS

    return [simulate(one.seed, one.setup, one.faults).problem for one in SEEDS]


@pytest.mark.timeout(400)  # a minute of computing, on busy cores several
def test_what_seeds_once_broke_holds() -> None:
    assert set(in_a_child(_named)) == {""}


def _reported() -> Any:
    from simulation.reports import REPORTS
    from simulation.run import simulate

    found = [(one, simulate(7, one.setup, one.faults)) for one in REPORTS]
    return {
        one.name: outcome.problem
        or [what for what, least in one.least.items() if outcome.counts.get(what, 0) < least]
        or ("" if any(one.told in f"{who} {what}" for _, who, what in outcome.story) else f"no word of {one.told!r}")
        for one, outcome in found
    }


def test_what_was_reported_of_other_systems_does_no_harm_here() -> None:
    found = in_a_child(_reported)
    assert found == dict.fromkeys(found, "")
