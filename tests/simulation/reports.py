"""What users of other systems have reported of their control planes, told to this one: each with the faults that make it up.

No rule may be broken in them; what they are about is counted, so that a story that never happens is noticed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from simulation.job import Setup
from simulation.plan import Fault

_BUSY = Setup(nodes=2, persist_every=5, step_s=1.0, copy_s=0.1, faults_s=150.0)


@dataclass(frozen=True)
class Report:
    """A situation.

    Attributes:
        name: What happened to others.
        faults: What goes wrong.
        setup: The job.
        least: Count -> how many of it there are at least.
        told: Words that the story must contain.
    """

    name: str
    faults: list[Fault]
    setup: Setup = _BUSY
    least: dict[str, int] = field(default_factory=lambda: {"commits": 2})
    told: str = ""


REPORTS = [
    Report("every restart begins with a state in which numbers are NaN",
           [Fault(40.0, "poison", 0, 0.3), Fault(60.0, "kill rank"), Fault(70.0, "kill rank", 1)], told="poison"),
    Report("one client is told SlowDown while the others write",
           [Fault(20.0, "storage refuses", 0, 0.9), Fault(25.0, "cut from root", 1, 0.7)], told="the storage refuses"),
    Report("an upload stalls for hours, and all processes live",
           [Fault(20.0, "storage is slow", 0, 1.0), Fault(30.0, "storage is gone", 0, 0.9)], told="does not answer"),
    Report("credentials expire after days",
           [Fault(40.0, "storage denies", 0, 0.7)], told="the root cannot be used"),
    Report("a worker dies in mid-upload, and the next group has another size",
           [Fault(14.0, "kill persister at a point", 0, 0.3), Fault(14.0, "kill persister at a point", 1, 0.3),
            Fault(20.0, "resize", 0), Fault(60.0, "kill persister at a point", 0, 0.5), Fault(61.0, "resize", 1)],
           told="start 1 ranks"),
    Report("a node is lost while it saves, the user goes back, and saves of lower steps are left out",
           [Fault(60.0, "lose node", 1, 0.1), Fault(85.0, "roll back", 0), Fault(120.0, "roll back", 1)],
           told="start 2 ranks on n0, n2"),
    Report("a checkpoint that was copied by hand is taken for unfinished, and deleted",
           [Fault(40.0, "operator copies", 0), Fault(50.0, "restart all nodes", 0, 0.2), Fault(90.0, "kill rank")],
           told="generation 3 begins with"),
    Report("a node leaves and comes back at once, again and again",
           [Fault(20.0 + 5 * turn, "kill agent", turn) for turn in range(20)], least={"starts": 6},
           told="start 2 ranks on n1, n2"),
    Report("the agent of the first node dies",
           [Fault(30.0, "kill agent", 0), Fault(80.0, "kill agent", 0)], least={"starts": 2},
           told="start 2 ranks on n1, n2"),
    Report("more machines come back than the job has room for, one of them with the memory of before",
           [Fault(40.0, "restart node", 0, 0.2), Fault(41.0, "restart node", 1, 0.3), Fault(80.0, "lose node", 2, 0.1),
            Fault(90.0, "restart node", 0, 0.1)], setup=Setup(nodes=2, spares=2, persist_every=5, step_s=1.0, faults_s=150.0),
           told="start 2 ranks on n2, n3"),
    Report("a lifecycle rule empties the bucket under a job that runs, and again while it is started",
           [Fault(30.0, "root is emptied", 1, 0.1), Fault(68.0, "root is emptied", 1, 0.9)],
           setup=replace(_BUSY, votes=True, persist_every=20),
           least={"emptied roots": 2, "emptied roots that a person was told of": 1, "commits": 3},
           told="no longer the root that this job has written to"),
    Report("a step fails from every state, until its samples are left out",
           [Fault(40.0, "a step fails", 0, 0.5)], setup=replace(_BUSY, votes=True),
           least={"failures that went further back": 4, "samples left out": 8}, told="--escalate"),
    Report("partners have no room for replicas, and readers hold what they keep",
           [Fault(0.5, "replica slots are held", 1, 0.1), Fault(0.6, "replica slots are held", 3, 0.1),
            *(Fault(50.0 + 4 * turn, "replica slots are held", 2 * turn, 0.9) for turn in range(6)), Fault(130.0, "lose node", 1)],
           setup=replace(_BUSY, nodes=3, slots=4, replicate=1),
           least={"replicas that found no memory": 1, "replicas that found no slot": 1, "replicated": 5}),
    Report("a large job commits indexes by their names, and is restored by as many and by fewer nodes",
           [Fault(60.0, "lose all nodes", 0, 0.1), Fault(90.0, "resize", 0), Fault(110.0, "lose all nodes", 0, 0.1)],
           setup=replace(_BUSY, nodes=3, spares=0, spread=True, votes=True), least={"commits that name indexes": 4},
           told="start 1 ranks"),
]  # fmt: skip
