"""Every course of events among persisters that was ever found to matter, as transcripts; and any other, by hypothesis."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.negotiations import Node, Root
from support.paths import TESTS
from support.transcripts import play

from flashckpt.core.lineage import Generation
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.daemon.persister import agreement, messaging, negotiation, persist, protocol
from flashckpt.daemon.persister.negotiation import Negotiation
from flashckpt.daemon.persister.protocol import Cause

SCENARIOS = sorted((TESTS / "scenarios").glob("*.txt"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_transcript(path: Path) -> None:
    lines = play(path.read_text())
    assert any(line.expected for line in lines), "it says nothing of actions"
    wrong = [str(line) for line in lines if not line.is_right]
    assert not wrong, "\n".join(wrong)


# -- a transcript that is wrong fails -----------------------------------------------------------------------


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_a_transcript_with_one_action_more_or_less_is_wrong(path: Path) -> None:
    text = path.read_text()
    numbers = [line.number for line in play(text) if line.expected is not None]
    for number in numbers:
        rows = text.splitlines()
        event, _, actions = rows[number - 1].partition("#")[0].partition("->")
        rest = actions.strip().partition(",")[2]
        for wrong in (f"{actions.strip()}, retain".lstrip(", "), rest) if actions.strip() else ("retain",):
            rows[number - 1] = f"{event}-> {wrong}"
            played = play("\n".join(rows))
            assert [line.number for line in played if not line.is_right] == [number]


@pytest.mark.parametrize(
    ("owner", "name", "value", "scenario"),
    [
        (persist, "LEASE_S", 0.0, "leader-dies-after-its-index"),
        (persist, "LEASE_S", 50.0, "committer-dies"),
        (persist, "RENEWALS", 0.01, "holder-waits"),
        (persist, "INTENT_PATIENCE_S", 1e9, "writers-that-never-finish"),
        (persist, "EARLIER_PATIENCE_S", 1e9, "node-lost-for-good-restored-that-step"),
        (persist, "EARLIER_PATIENCE_S", 1e9, "root-loses-what-was-written"),
        (persist, "ATTEMPTS", 2, "damaged-in-memory"),
        (messaging, "ROOT_LOOK_S", 1.0, "leader-dies-after-its-index"),
        (negotiation, "MIN_SLOTS", 1, "storage-fails-two-slots"),
        (persist, "is_rolled_back", lambda *_: False, "rolled-back-while-it-waits"),
        (negotiation, "is_rolled_back", lambda *_: False, "rolled-back-before-anybody-joined"),
        (negotiation, "of_other_nodes", lambda proposals, _: list(proposals), "early-look"),
        (messaging, "PATIENCE_S", 50.0, "ranks-of-one-node-hang"),
        (messaging, "PATIENCE_S", 0.05, "ranks-carry-messages"),
        (messaging, "CARRIED_LOOK_S", 600.0, "asked-where-the-ranks-hang"),
        (persist, "lease_of", lambda *_: None, "all-nodes-agree"),
        (persist.Persist, "_continue", lambda self, _: self._commit(), "commit-longer-than-its-lease"),
        (persist.Persist, "_continue", lambda self, _: self._commit(), "committer-hangs-while-it-commits"),
    ],
)
def test_a_machine_that_decides_otherwise_does_not_follow_its_transcript(
    owner: object, name: str, value: object, scenario: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = (path for path in SCENARIOS if path.stem == scenario)
    monkeypatch.setattr(owner, name, value)
    assert not follows(path)


def follows(path: Path) -> bool:
    try:
        return all(line.is_right for line in play(path.read_text()))
    except AssertionError:  # another end than `root holds` says
        return False


@pytest.mark.parametrize("line", ["1.0 a sleeps", "x a ticks", "1.0 z ticks", "1.0 root eats 1/1", "1.0 a takes ten"])
def test_a_line_that_is_not_understood_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="line 2 is not understood"):
        play(f"node a 0\n{line}")


def test_the_page_on_transcripts_names_every_action() -> None:
    """What the transcripts use is explained."""
    page = (SCENARIOS[0].parent / "README.md").read_text()
    for path in SCENARIOS:
        for line in play(path.read_text()):
            for action in line.expected or ():
                verb = action.rpartition(": ")[2].split()[0]
                assert re.search(rf"`{verb}[ `]", page), f"{path.name}: {action}"


# -- the machine is pure ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "module", [negotiation, messaging, persist, agreement, protocol], ids=lambda module: module.__name__
)
def test_the_machine_has_no_clock_no_store_and_no_thread(module: object) -> None:
    pure = {"__future__", "collections", "collections.abc", "dataclasses", "enum", "itertools", "typing"}
    ours = ("flashckpt.core.", "flashckpt.daemon.persister")
    tree = ast.parse(Path(str(vars(module)["__file__"])).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert {alias.name for alias in node.names} <= pure
        if isinstance(node, ast.ImportFrom):
            assert node.module in pure or str(node.module).startswith(ours), node.module
            if node.module == "flashckpt.daemon.persister":
                assert {alias.name for alias in node.names} <= {"protocol"}


def test_an_answer_that_nobody_waits_for_changes_nothing() -> None:
    machine = Negotiation(node_count=2)
    for event in (protocol.Done(), protocol.Committed(), protocol.IntentsRead(()), protocol.WriteFinished(1.0)):
        assert machine.step(event) == []
    node = Node(root=Root(), name="a", ranks=(0,), world_size=2, nodes=2)
    node.take(10, persist=True)
    tick = protocol.Tick(now_s=1.0, node=node.inventory(), generation=Generation(number=1))
    assert machine.step(tick) == [protocol.ReadRoot()]
    assert machine.step(protocol.Committed()) == []
    assert machine.step(tick) == [protocol.ReadRoot()], "what was not answered is asked again"
    assert machine.step(protocol.RootRead(None)) == [protocol.ReadIntents()]


# -- any course of events -----------------------------------------------------------------------------------

OPERATIONS = (
    *["advance"] * 9, *["round"] * 6, *["finish"] * 5, *["step"] * 2, *["start"] * 3, *["back"] * 2,
    "die", "cut", "fail", "bury", "forget", "urgent", "pause", "lose", "commit-fails", "commit-lasts", "wait", "restore", "all-start",
    *["all-carry"] * 2, "carry", "silent",
)  # fmt: skip


class Job:
    """Nodes that are driven action by action, in any order, while persisters die, writes fail and tombstones appear."""

    def __init__(self, count: int, slots: int, every: int) -> None:
        self.root, self.every, self.now_s = Root(), every, 0.0
        self.steps = [0] * count
        self.nodes = [
            Node(root=self.root, name=f"n{k}", ranks=(2 * k, 2 * k + 1), world_size=2 * count, nodes=count, slots=slots)
            for k in range(count)
        ]
        for node in self.nodes:
            node.start()

    def do(self, what: str, at: int, amount: int) -> None:
        """Let one thing happen at one node."""
        node = self.nodes[at]
        self.now_s += 0.11
        match what:
            case "advance":
                for _ in range(1 + amount):
                    self.advance(node)
            case "round":
                for other in [*range(at, len(self.nodes)), *range(at)]:
                    if amount % 3:
                        self.step(other)
                    self.turn(self.nodes[other])
            case "step":
                self.step(at)
            case "finish":
                node.finish(self.now_s)
            case "fail":
                node.fail(list(Cause)[amount % len(Cause)])
            case "die":
                node.die()
            case "all-start":
                for one in self.nodes:
                    one.start()
            case "start" if node.machine is None:
                node.start()
            case "carry" | "silent":
                node.carries = what == "carry"
            case "all-carry":
                for one in self.nodes:
                    one.carries = True
            case "cut" | "back":
                node.reachable = what == "back"
            case "bury" | "forget":
                self.clean(what, amount)
            case "urgent":
                if node.machine is not None and not node.pending:
                    node.tick(self.now_s, urgent=True)
            case "pause" if not node.pending:
                node.feed(protocol.Paused(node=node.inventory(), failing=amount % 2 == 0))
            case "lose":
                node.lose_memory()
            case "commit-fails":
                node.fails = list(Cause)[1 + amount % (len(Cause) - 1)]
            case "commit-lasts":
                node.lasts = not node.lasts
            case "wait":
                self.now_s += (1.0, 11.0, 700.0)[amount % 3]
            case "restore":
                self.restore(amount)
        self.root.check()

    def advance(self, node: Node) -> None:
        """Execute one action of a node, or begin its next turn."""
        if node.pending:
            node.advance()
        elif node.machine is not None:
            node.tick(self.now_s)

    def turn(self, node: Node) -> None:
        """A whole turn of a node that lives, with what it has begun."""
        self.now_s += 0.3
        node.run()
        self.advance(node)
        node.run()

    def step(self, at: int) -> None:
        """One step of training on one node; a node is at most two steps ahead of another."""
        if self.steps[at] <= min(self.steps) + 2:
            self.steps[at] += 1
            self.nodes[at].take(self.steps[at], persist=self.steps[at] % self.every == 0)

    def clean(self, what: str, amount: int) -> None:
        """Retention and sweep touch only what is older than the newest checkpoint."""
        newest = max(self.root.committed, default=SnapshotId(0, 0))
        older = sorted(one for one in self.root.decided if one < newest)
        if older and what == "bury":
            self.root.bury(older[amount % len(older)])
        elif older:
            self.root.intents.pop(older[amount % len(older)], None)
            self.root.marks.discard(older[amount % len(older)])

    def restore(self, amount: int) -> None:
        """All ranks die and restore some step; memory and persisters stay."""
        present = self.nodes[0].generation.number
        step = max(0, min(self.steps) - amount)
        generation = Generation(number=present + 1, parent=SnapshotId(present, step) if step else None)
        self.steps = [step] * len(self.nodes)
        for node in self.nodes:
            node.generation = generation

    def settle(self) -> None:
        """Faults end: all persisters live and reach the root. Ranks that carry nothing may do so for ever."""
        for node in self.nodes:
            node.reachable, node.fails, node.lasts = True, None, False
            if node.machine is None:
                node.start()

    def round(self) -> None:
        """Every node trains a step, does a turn and finishes what it writes."""
        for at, node in enumerate(self.nodes):
            self.step(at)
            self.turn(node)
            node.finish(self.now_s)


@settings(max_examples=150, deadline=None)
@given(
    count=st.integers(1, 3),
    slots=st.integers(2, 3),
    every=st.integers(1, 4),
    course=st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 2), st.integers(0, 8)), max_size=250),
)
def test_any_course_of_events_commits_only_what_is_whole_and_goes_on(
    count: int, slots: int, every: int, course: list[tuple[str, int, int]]
) -> None:
    """One decision per snapshot; a commit only where every index exists; no tombstone is overwritten (`Root`); progress."""
    job = Job(count, slots, every)
    for what, at, amount in course:
        job.do(what, at % count, amount)
    job.settle()
    before = set(job.root.committed)
    for number in range(400):
        job.now_s += persist.INTENT_PATIENCE_S if number == 200 else 0  # for writers whose memory was lost
        job.round()
        if max(job.root.committed - before, default=SnapshotId(0, 0)) > max(before, default=SnapshotId(0, 0)):
            return
    raise AssertionError(
        f"nothing was committed in 400 rounds: {job.root}, {[vars(node.machine) for node in job.nodes]}"
    )
