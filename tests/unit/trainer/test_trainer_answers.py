"""Probes of kind "generate": prompts with examples, options renamed, shuffled and hidden, and what counts as right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.evaluation import CHOICE, write_lines
from support.training import run_config

from flashckpt.errors import ConfigError, DataError
from flashckpt.trainer.config import RunConfig, from_values
from flashckpt.trainer.config.eval import ProbeConfig
from flashckpt.trainer.evaluate.scores import Evaluator
from flashckpt.trainer.model.transformer import Transformer
from flashckpt.trainer.parallel.apply import build_parallel
from flashckpt.trainer.parallel.distributed import process_group
from flashckpt.trainer.parallel.layout import resolve_layout
from flashckpt.trainer.scored.answers import NONE, AnswerQuestion, is_right, read_answers, stopped

SUMS = [{"prompt": f"{n} + {n} =", "answer": f"{2 * n}"} for n in range(6)]
SKY = {"question": "The sky is", "choices": ["green", "blue", "red"], "answer": "B"}


def questions(folder: Path, lines: list[dict[str, Any]], **settings: Any) -> list[AnswerQuestion]:
    probe = ProbeConfig(name="p", kind="generate", url=write_lines(folder / "p.jsonl", lines), **settings)
    return read_answers(probe)


def test_the_first_lines_are_examples_and_are_not_asked(tmp_path: Path) -> None:
    found = questions(tmp_path, SUMS, shots=2, limit=3)
    assert [one.answer for one in found] == ["4", "6", "8"]
    assert found[0].prompt == "0 + 0 = 0\n\n1 + 1 = 2\n\n2 + 2 ="
    with pytest.raises(DataError, match="no questions"):
        questions(tmp_path, SUMS, shots=6)


def test_questions_of_known_files_are_asked_with_their_options(tmp_path: Path) -> None:
    arc, stem, mmlu = CHOICE[2:5]
    lines = [CHOICE[0], arc, stem, mmlu, {"question": "How many?", "answer": "So it is\n#### 1,234"}]
    found = questions(tmp_path, lines)
    assert found[0].prompt == "Snow is\nA. white\nB. black as coal\nC. a bird\nAnswer:"
    assert [one.answer for one in found] == ["A", "B", "A", "B", "So it is\n#### 1,234"]
    assert found[1].prompt == "What falls from clouds?\nA. sand\nB. rain\nC. glass\nAnswer:"
    assert found[4].prompt == "Question: How many?\nAnswer:"


def test_options_are_renamed_shuffled_and_hidden(tmp_path: Path) -> None:
    (renamed,) = questions(tmp_path, [SKY], labels="xyz")
    assert (renamed.answer, renamed.options) == ("y", {"x": "green", "y": "blue", "z": "red"})
    (hidden,) = questions(tmp_path, [SKY], none_of_others=True)
    assert (hidden.answer, hidden.options) == ("B", {"A": "green", "B": NONE, "C": "red"})
    shuffled = questions(tmp_path, [SKY] * 20, shuffle=True)
    assert all(one.options[one.answer] == "blue" for one in shuffled)
    assert {one.answer for one in shuffled} == {"A", "B", "C"}
    assert shuffled == questions(tmp_path, [SKY] * 20, shuffle=True), "the same at every evaluation"
    examples = questions(tmp_path, [SKY] * 2, shots=1, none_of_others=True)
    assert examples[0].prompt.startswith("The sky is\nA. green\nB. blue\nC. red\nAnswer: B\n\n")
    with pytest.raises(DataError, match="3 choices, and 2 labels"):
        questions(tmp_path, [SKY], labels="xy")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"prompt": "x", "answer": 3}, "answer is a int"),
        ({"prompt": "x"}, "an object with prompt"),
        ({**SKY, "answer": 3}, "answer 3 of 3 choices"),
        ({**SKY, "answer": "E"}, "'E' is not the number"),
        ({"question": "x", "answerKey": "A", "choices": ["a"]}, "choices have no text"),
    ],
)
def test_a_line_that_cannot_be_asked_is_named(line: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"p\.jsonl:2 is no question of kind 'generate'") as caught:
        questions(tmp_path, [SUMS[0], line])
    assert words in str(caught.value)


OPTIONS = {"A": "a cat", "B": "a cat and a dog", "C": "12"}


@pytest.mark.parametrize(
    ("text", "answer", "match", "right"),
    [
        ("  Paris \n", "Paris", "exact", True),
        ("Paris.", "Paris", "exact", False),
        ("It is 1,234 of 5", "7 and 5, so\n#### 1234", "number", True),
        ("It is 5", "7 and 5, so\n#### 1234", "number", False),
        ("-2.50 m", "-2.5", "number", True),
        ("none", "3", "number", False),
        ("B", "B", "choice", True),
        ("(B) because of A", "B", "choice", True),
        ("But A", "B", "choice", False),
        ("a cat and a dog, not a cat", "B", "choice", True),
        ("I think a cat", "A", "choice", True),
        ("nothing", "A", "choice", False),
    ],
)
def test_what_counts_as_right(text: str, answer: str, match: str, right: bool) -> None:
    assert is_right(text, AnswerQuestion(prompt="", answer=answer, options=OPTIONS), match) is right


def test_a_text_ends_at_the_first_of_its_stop_strings() -> None:
    assert stopped("a b\nc. d", (".", "\n")) == "a b"
    assert stopped("a b", ("\n",)) is None
    assert stopped("\n", ("\n",)) == ""


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"kind": "choice", "shots": 1}, "shots has no effect"),
        ({"kind": "pairs", "stop": ["x"]}, "stop has no effect"),
        ({"match": "near"}, "match is unknown"),
        ({"max_tokens": 0}, "max_tokens is too small"),
        ({"stop": [""]}, "stop holds an empty text"),
        ({"labels": "AA"}, "labels cannot name options"),
        ({"shots": -1}, "shots is too small"),
    ],
)
def test_settings_without_effect_or_meaning_are_refused(values: dict[str, Any], words: str) -> None:
    probe = {"name": "p", "url": "p.jsonl", "kind": "generate", **values}
    with pytest.raises(ConfigError, match=words):
        from_values({"eval": {"every": 1, "probes": [probe]}})


def echo(config: RunConfig, following: dict[int, int]) -> dict[str, Any]:
    """Return the scores of a model that writes behind each byte the one that `following` names."""
    with process_group(config, alone=True) as device:
        parallel = build_parallel(config, resolve_layout(config, 1), device)
        parallel.fill(config)
        evaluator = Evaluator(config, parallel)
        (part,) = parallel.bare_parts()
        assert isinstance(part, Transformer)

        def forward(tokens: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            wanted = torch.tensor([[following.get(int(one), 10) for one in row] for row in tokens])
            return torch.nn.functional.one_hot(wanted, 256).float()

        part.forward = forward  # type: ignore[assignment, method-assign]  # a model that is known to the letter
        return dict(evaluator.scores().probes)


def test_accuracy_is_the_share_of_answers_that_the_model_writes(tmp_path: Path) -> None:
    lines = [
        {"prompt": f"say {one}", "answer": answer} for one, answer in (("a", "b"), ("b", "c"), ("c", "x"), ("q", ""))
    ]
    url = write_lines(tmp_path / "p.jsonl", lines)
    probes = [
        {"name": "one letter", "kind": "generate", "url": url, "max_tokens": 1},
        {"name": "to the end", "kind": "generate", "url": url, "stop": ["d"], "max_tokens": 5},
        {"name": "likely", "kind": "choice", "url": write_lines(tmp_path / "c.jsonl", [CHOICE[0]])},
        {"name": "long", "kind": "generate", "url": url, "limit": 2, "max_tokens": 10},
    ]
    config = run_config(tmp_path, eval={"every": 1, "held_out": False, "probes": probes})
    found = echo(config, {ord(a): ord(b) for a, b in ("ab", "bc", "cd")})
    assert list(found) == ["one letter", "to the end", "likely", "long"]
    assert found["one letter"] == {"acc": 0.75, "questions": 4, "cut": 0}
    assert found["to the end"] == {"acc": 0.5, "questions": 4, "cut": 0}, '"bc" and "c" up to the stop; "" of q'
    assert found["long"]["cut"] == 0
