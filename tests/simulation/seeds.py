"""Seeds that once broke a rule, each with the shortest story that did: one line, as `python -m simulation` prints it."""

from __future__ import annotations

from dataclasses import dataclass

from simulation.job import Setup
from simulation.plan import Fault


@dataclass(frozen=True)
class Seed:
    """The rule that was broken, and how."""

    rule: str
    seed: int
    setup: Setup
    faults: list[Fault]


SEEDS = [
    Seed("liveness", 1013, Setup(nodes=2, slots=2, step_s=1.0, persist_every=2, copy_s=0.8, keep_last=2, latency_s=0.005,
                                 faults_s=60.0), []),
    Seed("liveness", 11827269, Setup(nodes=4, slots=2, step_s=1.0, persist_every=2, copy_s=0.1, keep_last=2, latency_s=0.15,
                                     faults_s=60.0), []),
    Seed("liveness", 5, Setup(nodes=1, persist_every=3, faults_s=60.0),
         [Fault(40.0, "restart all nodes", 0, 0.0), Fault(46.2, "kill rank at a point", 0, 18 / 12 + 0.01)]),
    Seed("a restore takes the newest", 41,
         Setup(nodes=1, slots=3, step_s=1.0, persist_every=2, copy_s=0.1, keep_last=1, latency_s=0.005, faults_s=60.0),
         [Fault(11.72, "kill rank"), Fault(24.10, "kill rank"), Fault(34.08, "kill agent"), Fault(34.20, "kill rank"),
          Fault(44.12, "kill agent"), Fault(47.31, "kill rank", 1), Fault(47.49, "kill rank", 1), Fault(52.28, "kill rank"),
          Fault(54.32, "kill agent", 1), Fault(57.03, "kill rank", 1)]),
    Seed("liveness", 700002023, Setup(nodes=2, slots=2, step_s=1.0, persist_every=5, copy_s=0.8, latency_s=0.15),
         [Fault(19.22, "kill rank", 427, 0.27), Fault(84.85, "cut one way", 984, 0.43)]),
    Seed("liveness", 700003008, Setup(nodes=4, slots=2, step_s=3.0, persist_every=5, copy_s=0.1, keep_last=1, latency_s=0.15),
         [Fault(26.527378067369, "resize", 279, 0.9444119170239933),
          Fault(149.5595393604226, "cut between nodes", 960, 0.33355298658677146),
          Fault(154.4482256141185, "restart node", 217, 0.40205637927532856),
          Fault(184.81144846013638, "other job", 836, 0.7330293035117952),
          Fault(254.42447653412543, "cut between nodes", 537, 0.6133020794627592)]),
    # other nodes take a number that was never claimed, and one that had it comes back with what it holds
    Seed("one state per id", 1, Setup(nodes=2, spares=2, persist_every=5, step_s=3.0, copy_s=0.1, faults_s=200.0),
         [Fault(27.0, "cut from root", 0, 0.2), Fault(27.0, "cut from root", 1, 0.2), Fault(29, "kill rank"),
          Fault(46.0, "restart node", 0, 0.14), Fault(46.0, "restart node", 1, 0.14), Fault(67.0, "restart node", 2, 0.9)]),
    # the same, and both run on: the persister of the one that was overtaken claims nothing late, and commits nothing
    Seed("nothing that retention protects is deleted", 76,
         Setup(nodes=2, spares=2, slots=3, step_s=1.0, persist_every=1, persist_s=20, copy_s=0.8, latency_s=0.15),
         [Fault(232.4389408821682, "others take over", 303, 0.8023773956466232),
          Fault(240.56566138509427, "kill rank", 911, 0.3833278204238907)]),
    Seed("one committed state per id", 24,
         Setup(nodes=2, per_node=2, spares=2, slots=3, step_s=10.0, persist_every=12, copy_s=0.1, latency_s=0.15),
         [Fault(1.3197498465292168, "restart node", 528, 0.7423815265924102),
          Fault(46.84511671255033, "others take over", 957, 0.7997431615247124)]),
]  # fmt: skip
