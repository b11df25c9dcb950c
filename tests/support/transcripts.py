"""Transcripts of negotiations, as tests/scenarios/README.md describes them: read, and played."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from flashckpt.core.lineage import Generation
from flashckpt.core.snapshot_id import SnapshotId
from flashckpt.daemon.persister import protocol as p
from flashckpt.daemon.persister.protocol import Cause
from support.negotiations import Node, Root


@dataclass
class Line:
    """One line that was played.

    Attributes:
        number: In the file, from 1.
        text: As it stands there.
        expected: The actions that it names; None where it is not about actions.
        found: What was done.
    """

    number: int
    text: str
    expected: list[str] | None
    found: list[str]

    @property
    def is_right(self) -> bool:
        """Whether exactly the named actions followed."""
        return self.expected is None or self.expected == self.found

    def __str__(self) -> str:
        """Return it as people read it."""
        return f"line {self.number}: {self.text}\n    expected: {self.expected}\n    found:    {self.found}"


def play(text: str) -> list[Line]:
    """Play a transcript; return its lines with what was done. Raises ValueError for a line that is not understood."""
    stage, lines = Stage(), []
    for number, whole in enumerate(text.splitlines(), 1):
        line = whole.partition("#")[0].strip()
        if not line:
            continue
        event, arrow, actions = line.partition("->")
        words = event.split()
        try:
            if words[0] in ("node", "slots"):
                stage.declare(words)
                continue
            found = stage.play(float(words[0]), words[1], words[2:])
        except (ValueError, IndexError, KeyError) as error:
            raise ValueError(f"line {number} is not understood: {whole!r}: {error}") from error
        expected = [one.strip() for one in actions.split(",") if one.strip()]
        lines.append(Line(number, line, expected if arrow else None, found))
    return lines


@dataclass
class Stage:
    """The nodes of a transcript, and their root."""

    root: Root = field(default_factory=Root)
    nodes: dict[str, Node] = field(default_factory=dict)
    slots: int = 3

    def declare(self, words: list[str]) -> None:
        """A node, or the number of slots."""
        if words[0] == "slots":
            self.slots = int(words[1])
            return
        ranks = tuple(map(int, words[2:]))
        self.nodes[words[1]] = Node(root=self.root, name=words[1], ranks=ranks, world_size=0, nodes=0, slots=self.slots)
        for node in self.nodes.values():
            node.world_size, node.nodes = sum(len(one.ranks) for one in self.nodes.values()), len(self.nodes)

    def play(self, now_s: float, who: str, words: list[str]) -> list[str]:
        """Let something happen; return what was done."""
        if who == "root":
            self._root(words)
            return []
        found = []
        for node in self.nodes.values() if who == "all" else [self.nodes[who]]:
            node.effects.clear()
            self._node(node, now_s, words)
            found += [f"{node.name}: {effect}" if who == "all" else effect for effect in node.effects]
            self.root.check()
        return found

    def _root(self, words: list[str]) -> None:
        ids = [_id(word) for word in words[1:]]
        match words[0]:
            case "buries":
                self.root.bury(*ids)
            case "loses":
                self.root.indexes.pop(ids[0])
            case "forgets":
                self.root.intents.pop(ids[0])
                self.root.marks.discard(ids[0])
            case "holds":
                assert self.root.committed == set(ids), f"committed: {sorted(self.root.committed)}"
            case _:
                raise ValueError(words[0])

    def _node(self, node: Node, now_s: float, words: list[str]) -> None:
        match words:
            case ["starts"]:
                node.start()
            case ["dies"]:
                node.die()
            case ["dies", ("before" | "after") as when, what]:
                _die(node, now_s, when, what)
            case ["takes", *steps]:
                _take(node, steps)
            case ["ticks"] | ["ticks", "urgently"]:
                _turn(node, lambda: node.tick(now_s, urgent=len(words) > 1))
            case ["pauses"] | ["pauses", "failing"]:
                paused = p.Paused(node=node.inventory(), failing=len(words) > 1)
                _turn(node, lambda: node.feed(paused))
            case ["finishes"]:
                assert node.writing is not None, f"{node.name} writes nothing"
                node.finish(now_s)
                _turn(node, node.hear)
            case ["fails", cause]:
                assert node.writing is not None, f"{node.name} writes nothing"
                node.fail(Cause[cause.upper()])
                _turn(node, node.hear)
            case ["commit", "fails", cause]:
                node.fails = Cause[cause.upper()]
            case ["commit", "lasts"] | ["commit", "ends"]:
                node.lasts = words[1] == "lasts"
            case ["is", "cut", "off"] | ["is", "back"]:
                node.reachable = words[1] == "back"
            case ["carries"] | ["carries", "nothing"]:
                node.carries = len(words) == 1
            case ["loses", "its", "memory"]:
                node.lose_memory()
            case ["restores", parent, "as", number]:
                node.generation = Generation(number=int(number), parent=_id(parent))
            case _:
                raise ValueError(" ".join(words))


def _turn(node: Node, begin: Callable[[], None]) -> None:
    assert node.machine is not None, f"{node.name} does not live"
    begin()
    node.run()


def _die(node: Node, now_s: float, when: str, what: str) -> None:
    """Tick, and die before or after the first action of a name."""
    node.tick(now_s)
    names = {"decide": p.WriteIntent, "commit": p.Commit, "close": p.CloseIntent, "propose": p.PublishProposal,
             "write": p.StartWrite, "abandon": p.AbandonIntent, "retain": p.ApplyRetention}  # fmt: skip
    while node.pending and not isinstance(node.pending[0], names[what]):
        node.advance()
    assert node.pending, f"{node.name} never comes to {what}: {node.effects}"
    if when == "after":
        node.advance()
    node.die()


def _take(node: Node, steps: list[str]) -> None:
    ranks = None
    if "by" in steps:
        at = steps.index("by")
        steps, ranks = steps[:at], [int(rank) for rank in steps[at + 1 :]]
    for step in steps:
        taken = node.take(int(step.rstrip("*")), persist=step.endswith("*"), ranks=ranks)
        assert taken, f"{node.name} has no slot for step {step}"


def _id(word: str) -> SnapshotId:
    generation, step = word.split("/")
    return SnapshotId(int(generation), int(step))
