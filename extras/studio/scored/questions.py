"""Questions of probes from JSON Lines: which texts are compared, and which one is right. Torch-free.

Fields are those of the files that people have: BLiMP, HellaSwag, ARC and MMLU, with the prompts that lm-eval makes of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from flashckpt.errors import DataError
from flashckpt.sampler.datasets.contents import HEAD_BYTES, decoded, refuse_no_text
from flashckpt.sampler.datasets.remote_file import RemoteFile, is_remote
from flashckpt.trainer.config.eval import ProbeConfig

Line = Mapping[str, Any]
Question = TypeVar("Question")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeQuestion:
    """`endings` that may follow `prompt` and a `space`, and the number of the right one."""

    prompt: str
    endings: tuple[str, ...]
    right: int = 0
    space: str = ""

    @property
    def continuations(self) -> tuple[str, ...]:
        """What follows the prompt."""
        return tuple(self.space + ending for ending in self.endings)


def read_questions(probe: ProbeConfig) -> list[ProbeQuestion]:
    """Return the questions of a probe, in the order of its lines; raises as `parse_lines`."""
    return parse_lines(probe, lambda values: _checked(_parsed(values, probe.kind)))


def parse_lines(probe: ProbeConfig, parse: Callable[[Any], Question]) -> list[Question]:
    """Return what `parse` makes of the lines of a probe, in their order.

    Raises:
        DataError: the file cannot be read or has no line more than it shows as examples, or a line is none of the forms of
            the probe's kind; it is named.
    """
    options = probe.storage_options if is_remote(probe.url) else None
    blob = RemoteFile(probe.url, storage_options=options)
    content = b"".join(data for _, data in blob.chunks())
    refuse_no_text(probe.url, content[:HEAD_BYTES], "JSON Lines in UTF-8")
    questions: list[Question] = []
    for number, line in enumerate(decoded(content, probe.url).split("\n"), 1):
        if line.strip() and not 0 < probe.limit <= len(questions):
            questions.append(_question(probe, number, line, parse))
    if len(questions) <= probe.shots:
        raise DataError(
            f"the probe {probe.name} has no questions",
            found=f"{len(questions) or 'no'} line in {probe.url}"
            + (f", and shots = {probe.shots}" if probe.shots else ""),
            expected=_EXPECTED[probe.kind],
            state="Nothing was started.",
        )
    return questions


def _question(probe: ProbeConfig, number: int, line: str, parse: Callable[[Any], Question]) -> Question:
    try:
        return parse(json.loads(line))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        found = f"no {error.args[0]}" if isinstance(error, KeyError) else str(error)
        raise DataError(
            f"{probe.url}:{number} is no question of kind {probe.kind!r}",
            found=found[:200],
            expected=_EXPECTED[probe.kind],
            state="Nothing was started.",
            remedy="repair the line, or set eval.probes.kind to what the file holds",
        ) from error


def _parsed(values: Any, kind: str) -> ProbeQuestion:
    if not isinstance(values, dict):
        raise TypeError(f"a {type(values).__name__}, not an object")
    for keys, make in _FORMS[kind]:
        if keys <= values.keys():
            return make(values)
    raise ValueError(f"an object with {', '.join(values) or 'nothing'}")


def _checked(question: ProbeQuestion) -> ProbeQuestion:
    if not all(question.endings):
        raise ValueError("an ending without text")
    if not 0 <= question.right < len(question.endings):
        raise ValueError(f"answer {question.right} of {len(question.endings)} endings")
    return question


def text_of(values: Line, key: str) -> str:
    """Return the text of a key; TypeError where it is none."""
    if not isinstance(values[key], str):
        raise TypeError(f"{key} is a {type(values[key]).__name__}, not a string")
    return str(values[key])


def texts_of(values: Any, key: str) -> tuple[str, ...]:
    """Return a list of two strings or more; TypeError where it is none."""
    if not isinstance(values, list) or len(values) < 2 or not all(isinstance(one, str) for one in values):
        raise TypeError(f"{key} is not a list of two strings or more")
    return tuple(values)


def _probability(values: Line) -> ProbeQuestion:
    return ProbeQuestion(prompt=text_of(values, "prompt"), endings=(text_of(values, "target"),))


def _pair(better: str, worse: str) -> Callable[[Line], ProbeQuestion]:
    return lambda values: ProbeQuestion(prompt="", endings=(text_of(values, better), text_of(values, worse)))


def _plain(values: Line) -> ProbeQuestion:
    endings = texts_of(values["choices"], "choices")
    return ProbeQuestion(prompt=text_of(values, "prompt"), endings=endings, right=index_of(values["answer"]))


def _hellaswag(values: Line) -> ProbeQuestion:
    prompt = text_of(values, "ctx")
    if {"ctx_a", "ctx_b", "activity_label"} <= values.keys():
        begin, end = text_of(values, "ctx_a"), text_of(values, "ctx_b").capitalize()
        prompt = f"{text_of(values, 'activity_label')}: {begin} {end}"
    endings = tuple(_without_marks(one) for one in texts_of(values["endings"], "endings"))
    return ProbeQuestion(prompt=_without_marks(prompt), endings=endings, right=index_of(values["label"]), space=" ")


def _without_marks(text: str) -> str:
    """Remove what the WikiHow part of HellaSwag was marked up with, as lm-eval does."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def arc_of(values: Line) -> tuple[str, tuple[str, ...], int]:
    """Return question, texts and the number of the right one of a line of ARC.

    As the data set on the hub has it, or with the question as an object, as its makers published it.
    """
    question, choices = values["question"], values.get("choices")
    if isinstance(question, dict):
        listed = question["choices"]
        choices = {name: [one[name] for one in listed] for name in ("text", "label")}
        question = question["stem"]
    if not isinstance(question, str) or not isinstance(choices, dict):
        raise TypeError("question is not a string, or choices have no text and label")
    labels = [str(one) for one in choices["label"]]
    if str(values["answerKey"]) not in labels:
        raise ValueError(f"answerKey {values['answerKey']!r} is none of {', '.join(labels)}")
    return question, texts_of(choices["text"], "choices.text"), labels.index(str(values["answerKey"]))


def _arc(values: Line) -> ProbeQuestion:
    question, endings, right = arc_of(values)
    return ProbeQuestion(prompt=f"Question: {question}\nAnswer:", endings=endings, right=right, space=" ")


def _mmlu(values: Line) -> ProbeQuestion:
    """The letters are compared; the choices are part of the question."""
    texts = texts_of(values["choices"], "choices")
    letters = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ"[: len(texts)])
    answer = values["answer"]
    listed = "\n".join(f"{letter}. {text}" for letter, text in zip(letters, texts, strict=True))
    subject = text_of(values, "subject").replace("_", " ") if values.get("subject") else ""
    about = f"The following are multiple choice questions (with answers) about {subject}.\n\n" if subject else ""
    return ProbeQuestion(
        prompt=f"{about}{text_of(values, 'question').strip()}\n{listed}\nAnswer:",
        endings=letters,
        right=letters.index(answer) if isinstance(answer, str) and answer in letters else index_of(answer),
        space=" ",
    )


def index_of(value: Any) -> int:
    """Return the number of an answer: an integer, or one as a string."""
    if isinstance(value, bool) or not isinstance(value, int | str) or not re.fullmatch(r"\d+", str(value)):
        raise ValueError(f"{value!r} is not the number of an answer")
    return int(value)


_FORMS: Mapping[str, tuple[tuple[set[str], Callable[[Line], ProbeQuestion]], ...]] = {
    "probability": (({"prompt", "target"}, _probability),),
    "pairs": (
        ({"better", "worse"}, _pair("better", "worse")),
        ({"sentence_good", "sentence_bad"}, _pair("sentence_good", "sentence_bad")),
    ),
    "choice": (
        ({"prompt", "choices", "answer"}, _plain),
        ({"ctx", "endings", "label"}, _hellaswag),
        ({"question", "answerKey"}, _arc),
        ({"question", "choices", "answer"}, _mmlu),
    ),
}
_EXPECTED = {
    "generate": "an object with prompt and answer, question and answer (texts), or a question of kind choice",
    "probability": "an object with prompt and target",
    "pairs": "an object with better and worse, or sentence_good and sentence_bad",
    "choice": "an object with prompt, choices, answer; or as in HellaSwag (ctx, endings, label), ARC (question, choices, "
    "answerKey) or MMLU (question, choices, answer)",
}
