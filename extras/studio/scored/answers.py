"""Questions that are answered by what the model writes: prompts with examples in front, options, and what counts as right. Torch-free."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from flashckpt.trainer.config.eval import ProbeConfig
from flashckpt.trainer.scored.questions import arc_of, index_of, parse_lines, text_of, texts_of

NONE = "None of the others"
_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|-?\.\d+")


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerQuestion:
    """A `prompt` to be continued, the `answer` that is right, and the options, by label, if there are some."""

    prompt: str
    answer: str
    options: Mapping[str, str]


def read_answers(probe: ProbeConfig) -> list[AnswerQuestion]:
    """Return the questions of a probe of kind "generate" in the order of its lines, each behind the same examples.

    The first `shots` lines are those examples, as they are in the file; they are not asked. Examples, and a prompt and its
    answer, are joined as lm-eval joins them.

    Raises:
        DataError: See `read_questions`.
    """
    wanted = replace(probe, limit=probe.limit + probe.shots if probe.limit else 0)
    lines = parse_lines(wanted, lambda values: _parsed(values, len(probe.labels)))
    shown, asked = lines[: probe.shots], lines[probe.shots :]
    examples = "".join(
        f"{one.prompt} {one.answer}\n\n" for one in (_listed(text, probe.labels, right) for text, right in shown)
    )
    found = []
    for number, (text, right) in enumerate(asked):
        question = _listed(*_changed(text, right, probe, number))
        found.append(replace(question, prompt=examples + question.prompt))
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class _OpenQuestion:
    """What is asked: text, and the options in their order."""

    prompt: str
    options: tuple[str, ...] = ()


def _parsed(values: Any, most: int) -> tuple[_OpenQuestion, str | int]:
    """Return the question of a line with `most` options, and its answer: a text, or the number of an option."""
    if not isinstance(values, dict):
        raise TypeError(f"a {type(values).__name__}, not an object")
    for keys, make in _FORMS:
        if keys <= values.keys():
            text, right = make(values)
            if len(text.options) > most:
                raise ValueError(f"{len(text.options)} choices, and {most} labels")
            return text, right
    raise ValueError(f"an object with {', '.join(values) or 'nothing'}")


def _options(prompt: str, texts: tuple[str, ...], answer: Any) -> tuple[_OpenQuestion, int]:
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[: len(texts)]
    right = letters.index(answer) if isinstance(answer, str) and answer and answer in letters else index_of(answer)
    if right >= len(texts):
        raise ValueError(f"answer {right} of {len(texts)} choices")
    return _OpenQuestion(prompt=prompt, options=tuple(one.strip() for one in texts)), right


def _arc(values: Mapping[str, Any]) -> tuple[_OpenQuestion, int]:
    question, texts, right = arc_of(values)
    return _options(question, texts, right)


_FORMS: tuple[tuple[set[str], Callable[[Mapping[str, Any]], tuple[_OpenQuestion, str | int]]], ...] = (
    (
        {"prompt", "choices", "answer"},
        lambda line: _options(text_of(line, "prompt"), texts_of(line["choices"], "choices"), line["answer"]),
    ),
    ({"question", "answerKey"}, _arc),
    (
        {"question", "choices", "answer"},
        lambda line: _options(text_of(line, "question").strip(), texts_of(line["choices"], "choices"), line["answer"]),
    ),
    ({"prompt", "answer"}, lambda line: (_OpenQuestion(prompt=text_of(line, "prompt")), text_of(line, "answer"))),
    (
        {"question", "answer"},
        lambda line: (_OpenQuestion(prompt=f"Question: {text_of(line, 'question')}\nAnswer:"), text_of(line, "answer")),
    ),
)


def _changed(
    text: _OpenQuestion, right: str | int, probe: ProbeConfig, number: int
) -> tuple[_OpenQuestion, str, str | int]:
    """Return a question with its options shuffled, and the right one hidden behind NONE, where the probe says so."""
    options = list(text.options)
    if isinstance(right, int) and probe.none_of_others:
        options[right] = NONE
    if isinstance(right, int) and probe.shuffle:
        order = random.Random(f"{probe.name}:{number}").sample(range(len(options)), len(options))
        options, right = [options[one] for one in order], order.index(right)
    return replace(text, options=tuple(options)), probe.labels, right


def _listed(text: _OpenQuestion, labels: str, right: str | int) -> AnswerQuestion:
    if isinstance(right, str):
        return AnswerQuestion(prompt=text.prompt, answer=right.strip(), options={})
    options = dict(zip(labels, text.options, strict=False))
    listed = "\n".join(f"{label}. {option}" for label, option in options.items())
    return AnswerQuestion(prompt=f"{text.prompt}\n{listed}\nAnswer:", answer=labels[right], options=options)


def stopped(text: str, stop: tuple[str, ...]) -> str | None:
    """Return a text up to the first of the strings that end it; None if it has none of them."""
    places = [place for one in stop if (place := text.find(one)) >= 0]
    return text[: min(places)] if places else None


def is_right(text: str, question: AnswerQuestion, match: str) -> bool:
    """Return whether what the model wrote is the answer.

    Args:
        text: Up to the stop string.
        question: What was asked.
        match: "exact": the answer and nothing else, but for white space around it. "number": its first number is the last
            one of the answer, where GSM8K has it. "choice": it begins with the label, or the first option that it names
            is the right one.
    """
    if match == "number":
        mine, wanted = numbers_in(text), numbers_in(question.answer)
        return bool(mine and wanted) and mine[0] == wanted[-1]
    if match == "choice" and question.options:
        return _chosen(text.strip(), question.options) == question.answer
    return text.strip() == question.answer


def numbers_in(text: str) -> list[Decimal]:
    """Return the numbers in a text; commas between thousands do not count."""
    return [Decimal(one.replace(",", "")) for one in _NUMBER.findall(text)]


def _chosen(text: str, options: Mapping[str, str]) -> str:
    """Return the label that a text begins with, or of the option that it names first, the longest of several; "": none."""
    match = re.match(r"[(\[]?(\w)(?!\w)", text)
    if match and match[1] in options:
        return match[1]
    named = [(place, -len(option), label) for label, option in options.items() if (place := text.find(option)) >= 0]
    return min(named)[2] if named else ""
