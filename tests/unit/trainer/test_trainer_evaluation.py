"""Evaluation: bytes of text of any tokenizer, what is counted and how often, the forms of questions, one clear error each."""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.evaluation import CHOICE, PAIRS, PROBABILITY, TEXTS, write_evaluation, write_lines
from support.training import run_config, write_corpus

from flashckpt.errors import ConfigError, DataError
from flashckpt.trainer.config import RunConfig, from_values, read_config, to_toml, without_secrets
from flashckpt.trainer.config.changes import recorded_values
from flashckpt.trainer.config.eval import ProbeConfig
from flashckpt.trainer.data.mixed import MixedDataset
from flashckpt.trainer.evaluate.results import Score, Scores, curves_of, plain_scores, score_lines, score_table
from flashckpt.trainer.evaluate.rows import NO_TARGET, RowScores, chunks_of
from flashckpt.trainer.evaluate.scores import Evaluator, Probe, continued, open_probes
from flashckpt.trainer.parallel.apply import build_parallel
from flashckpt.trainer.parallel.distributed import process_group
from flashckpt.trainer.parallel.layout import resolve_layout
from flashckpt.trainer.prepare.shards import prepare
from flashckpt.trainer.prepare.vocabulary import Vocabulary, train_bpe
from flashckpt.trainer.scored.questions import read_questions
from flashckpt.trainer.scored.sets import check_evaluation, prepare_sets, run_vocabulary, sets_of

needs_tokenizers = pytest.mark.skipif(
    importlib.util.find_spec("tokenizers") is None,
    reason="the tokenizers library is not installed; `make test-hub` installs it and runs this",
)
TOKENIZERS = ["bytes", pytest.param("bpe", marks=needs_tokenizers), pytest.param("words", marks=needs_tokenizers)]


def tokenizer_of(name: str) -> bytes:
    """Return a tokenizer.json: a byte-level BPE, or words that drop the white space between them."""
    if name == "bytes":
        return b""
    if name == "bpe":
        return train_bpe(TEXTS * 3, 300)
    import tokenizers
    import tokenizers.trainers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainer = tokenizers.trainers.WordLevelTrainer(special_tokens=["?", "</s>"])
    tokenizer.train_from_iterator(TEXTS, trainer)
    return str(tokenizer.to_str()).encode()


ODD = ["plain words", "caf\u00e9 \u4e2d\u6587 \U0001f600 end", "  spaces   inside and behind  \n\n", "x"]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_each_byte_of_a_text_is_of_one_token_and_the_end_token_is_no_text(name: str) -> None:
    vocabulary = Vocabulary(tokenizer_of(name))
    for text, (tokens, marks) in zip(ODD, vocabulary.encode_with_bytes(ODD), strict=True):
        assert tokens.tolist() == vocabulary.encode([text])[0].tolist()
        assert len(marks) == len(tokens)
        assert marks[-1] == 0
        assert (marks[:-1] >= 1).all()
        assert int(marks[:-1].sum()) - (len(marks) - 1) == len(text.encode())


def run_of(folder: Path, tokenizer: str = "bytes", **data: Any) -> RunConfig:
    """Return a run over one source of text, evaluated on the texts of `support.evaluation`."""
    (folder / "raw").mkdir(parents=True, exist_ok=True)
    source = write_lines(folder / "raw" / "train.jsonl", [{"text": f"{text} {n}"} for n in range(4) for text in TEXTS])
    if tokenizer != "bytes":
        (folder / "tokenizer.json").write_bytes(tokenizer_of(tokenizer))
        data["tokenizer"] = str(folder / "tokenizer.json")
    return run_config(
        folder,
        model={"vocab": 512},
        train={"seq_len": 32, "global_batch": 4},
        data={
            "source": ["stdlib"], "folder": str(folder / "tokens"), "holdout_every": 4,
            "sources": [{"kind": "jsonl", "urls": [source], "channel": "stories"}], **data,
        },
        eval={**write_evaluation(folder / "evaluation"), "batches": 100},
    )  # fmt: skip


@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_set_counts_every_token_and_byte_that_is_predicted_once(name: str, mask: bool, tmp_path: Path) -> None:
    """The last window is not full, and the windows are no multiple of a batch."""
    config = run_of(tmp_path, name, document_mask=mask)
    prepare(config.data)
    prepare_sets(config)
    data = MixedDataset(sets_of(config), "held", is_sets=True)
    ids = data.channel_ids(0, len(data.samples))
    targets, sizes = data.batch(ids).targets[:, :-1].numpy(), data.text_bytes(ids)
    assert sizes is not None
    encoded = run_vocabulary(config).encode_with_bytes(TEXTS)
    unpredicted = [marks[0] for _, marks in encoded] if mask else [encoded[0][1][0]]
    assert (targets != NO_TARGET).sum() == sum(len(tokens) for tokens, _ in encoded) - len(unpredicted)
    text_bytes = sizes[(targets != NO_TARGET) & (sizes >= 0)].sum()
    assert text_bytes == sum(len(text.encode()) for text in TEXTS) - sum(int(mark) - 1 for mark in unpredicted)
    assert data.text_bytes(data.channel_ids(1, 3)) is None  # files of tokens have no text


def scores_of(config: RunConfig, *, is_uniform: bool) -> Scores:
    with process_group(config, alone=True) as device:
        parallel = build_parallel(config, resolve_layout(config, 1), device)
        if not is_uniform:
            parallel.fill(config)
        return Evaluator(config, parallel).scores()  # weights are zeros: all tokens are alike


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_model_that_knows_nothing_takes_log2_of_the_vocabulary_per_token(name: str, tmp_path: Path) -> None:
    """And so many bits per byte as the text that is predicted has tokens per byte, whatever the tokenizer."""
    config = run_of(tmp_path, name)
    prepare(config.data)
    prepare_sets(config)
    scores = scores_of(config, is_uniform=True)
    texts = [
        marks[1:-1] for _, marks in run_vocabulary(config).encode_with_bytes(TEXTS)
    ]  # without first and end tokens
    tokens, nbytes = sum(map(len, texts)), sum(int(marks.sum()) - len(marks) for marks in texts)
    story = scores.sets["stories"]
    assert story.bits_per_byte == pytest.approx(9 * tokens / nbytes, rel=1e-6)
    assert story.loss == pytest.approx(math.log(512), rel=1e-6)
    assert story.perplexity == pytest.approx(512, rel=1e-5)
    assert story.tokens == sum(len(marks) + 1 for marks in texts)
    assert math.isnan(scores.sets["flat"].bits_per_byte)
    held = scores.held_out["stories"]
    assert held.loss == pytest.approx(math.log(512), rel=1e-6)
    if name == "bytes":
        assert held.bits_per_byte == pytest.approx(9, rel=1e-6)
        assert story.bits_per_byte == pytest.approx(9, rel=1e-6)
    assert scores.probes["pairs"]["accuracy"] < 1.0  # of equals none is better


@needs_tokenizers
def test_two_tokenizers_of_one_text_compare_by_bits_per_byte(tmp_path: Path) -> None:
    """A model that gives each byte 5 bits, however it is cut, has 5 bits per byte under each; per token they differ."""
    found = {}
    for name in ("bytes", "bpe", "words"):
        config = run_of(tmp_path / name, name)
        prepare(config.data)
        prepare_sets(config)
        data = MixedDataset(sets_of(config), "held", is_sets=True)
        ids = data.channel_ids(0, len(data.samples))
        targets, sizes = data.batch(ids).targets[:, :-1].numpy(), data.text_bytes(ids)
        assert sizes is not None
        is_text = (targets != NO_TARGET) & (sizes >= 0)
        nats = np.where(is_text, sizes, 0).sum(1) * 5 * math.log(2)
        found[name] = (nats.sum() / is_text.sum(), nats.sum() / math.log(2) / np.where(is_text, sizes, 0).sum())
    assert [bits for _, bits in found.values()] == pytest.approx([5, 5, 5])
    assert found["words"][0] > found["bpe"][0] > found["bytes"][0]


@pytest.mark.matrix
def test_batches_weigh_their_tokens_not_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result does not depend on how windows are put into batches, though the last one is nearly empty."""
    config = run_of(tmp_path)
    prepare(config.data)
    prepare_sets(config)
    found = []
    for batch, micro in ((4, 2), (6, 3), (16, 16)):
        train = replace(config.train, global_batch=batch, micro_batch=micro)
        found.append(scores_of(replace(config, train=train), is_uniform=False))
    for other in found[1:]:
        for name in ("stories", "flat"):
            assert other.sets[name].tokens == found[0].sets[name].tokens
            assert other.sets[name].loss == pytest.approx(found[0].sets[name].loss, abs=1e-6)
        assert other.held_out["stories"].loss == pytest.approx(found[0].held_out["stories"].loss, abs=1e-6)
        assert other.probes["probability"] == pytest.approx(found[0].probes["probability"], rel=1e-5)


def test_rows_go_together_by_length_and_each_comes_once() -> None:
    chunks = chunks_of([3, 40, 17, 100, 16, 1, 5], 3, most=48, multiple=6)
    assert [chunk.ids.tolist() for chunk in chunks] == [[3, 1, 2], [4, 6, 0], [5]]
    assert [chunk.length for chunk in chunks] == [48, 18, 18]


@needs_tokenizers
def test_a_continuation_is_cut_where_both_were_tokenised_together() -> None:
    vocabulary = Vocabulary(tokenizer_of("bpe"))
    pairs = [("and then and", " then the end"), ("and then ", "the end"), ("", "and then"), ("the en", "d")]
    for (prompt, rest), one in zip(pairs, continued(vocabulary, pairs, None), strict=True):
        whole = vocabulary.encode([prompt + rest])[0][:-1].tolist()
        assert one.tokens.tolist() == ([] if prompt else [vocabulary.end]) + whole
        alone = len(vocabulary.encode([prompt.rstrip()])[0]) - 1
        assert one.targets == max(1, len(whole) - alone)
    assert continued(vocabulary, [("a", "b")], 7)[0].tokens[0] == 7


def test_white_space_before_a_continuation_belongs_to_it() -> None:
    one, other = continued(Vocabulary(b""), [("two and ", "two"), ("two and", " two")], None)
    assert one.tokens.tolist() == other.tokens.tolist() == list(b"two and two")
    assert one.targets == other.targets == 4


def test_texts_too_long_for_the_model_are_cut_from_the_left_and_counted(caplog: Any) -> None:
    questions = read_like([{"prompt": "0123456789", "target": "abcd"}, {"prompt": "", "target": "klmnopqrst"}])
    pairs = [(one.prompt, text) for one in questions for text in one.continuations]
    probe = Probe("p", "probability", questions, continued(Vocabulary(b""), pairs, None), 6)
    assert probe.cut == 2
    rows = probe.rows(np.arange(2), 6)
    assert bytes(rows.tokens[0].tolist()) == b"789abc"
    assert bytes(rows.targets[0][rows.targets[0] >= 0].tolist()) == b"abcd"
    assert bytes(rows.tokens[1].tolist()) == b"nopqrs"
    assert bytes(rows.targets[1].tolist()) == b"opqrst"
    assert "2 of 2 texts of the probe p are longer than train.seq_len = 6" in caplog.text


def read_like(lines: list[dict[str, Any]], kind: str = "probability", **more: Any) -> Any:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return read_questions(
            ProbeConfig(name="p", kind=kind, url=write_lines(Path(folder) / "p.jsonl", lines), **more)
        )


def test_accuracy_is_what_the_harness_calls_by_these_names() -> None:
    """By likelihood the first ending of each, by likelihood per character or per byte another."""
    lines = [
        {"prompt": "q", "choices": [" a", " bbbbbb", " \u00e9\u00e9\u00e9\u00e9"], "answer": answer}
        for answer in range(3)
    ]
    questions = read_like(lines, "choice")
    costs = np.array([2.0, 4.0, 3.5] * 3)  # per character 1, 0.57, 0.7; per byte 1, 0.57, 0.39
    zeros = np.zeros(9)
    scores = RowScores(nats=costs, targets=zeros + 3, greedy=zeros, text_nats=costs, nbytes=zeros)
    texts = continued(Vocabulary(b""), [("q", text) for one in questions for text in one.continuations], None)
    found = Probe("p", "choice", questions, texts, 64).results(scores)
    assert found == {"acc": 1 / 3, "acc_norm": 1 / 3, "acc_bytes": 1 / 3, "questions": 3, "cut": 0}
    by = [np.argmax(-costs[:3] / sizes) for sizes in ([1, 1, 1], [2, 7, 5], [2, 7, 9])]
    assert by == [0, 1, 2]


def test_known_files_are_read_as_they_are(tmp_path: Path) -> None:
    assert [len(read_like(lines, kind)) for lines, kind in ((PROBABILITY, "probability"), (PAIRS, "pairs"))] == [3, 3]
    plain, hellaswag, arc, published, mmlu = read_like(CHOICE, "choice")
    assert plain.continuations == (" white", " black as coal", " a bird")
    assert hellaswag.prompt == "Baking: A man bakes. He"
    assert hellaswag.continuations[:2] == (" eats a stone. x", " opens the oven.")
    assert (arc.prompt, arc.right) == ("Question: What falls from clouds?\nAnswer:", 1)
    assert (published.prompt, published.endings, published.right) == (
        "Question: Ice is\nAnswer:",
        ("cold", "hot"),
        0,
    )
    assert mmlu.continuations == (" A", " B", " C", " D")
    assert mmlu.right == 1
    assert len(read_like(CHOICE, "choice", limit=2)) == 2


BAD = [
    ("probability", "{", "is no question of kind 'probability'"),
    ("probability", '["prompt", "target"]', "a list, not an object"),
    ("probability", '{"prompt": "a"}', "an object with prompt"),
    ("probability", '{"prompt": "a", "target": ""}', "an ending without text"),
    ("probability", '{"prompt": 3, "target": "a"}', "prompt is a int, not a string"),
    ("pairs", '{"better": "a"}', "an object with better"),
    ("choice", '{"ctx": "a", "endings": ["b", "c"], "label": ""}', "'' is not the number of an answer"),
    ("choice", '{"ctx": "a", "endings": ["b", "c"], "label": 2}', "answer 2 of 2 endings"),
    ("choice", '{"ctx": "a", "endings": "bc", "label": 1}', "endings is not a list"),
    ("choice", '{"question": {"choices": []}, "answerKey": "A"}', "no stem"),
    ("choice", '{"question": "a", "choices": {"text": ["b", "c"], "label": ["A", "B"]}, "answerKey": "C"}', "none of A, B"),
    ("choice", '{"question": "a", "choices": ["b", "c"], "answer": "E"}', "'E' is not the number of an answer"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "line", "words"), BAD)
def test_a_line_that_is_no_question_is_named(kind: str, line: str, words: str, tmp_path: Path) -> None:
    good = {"probability": PROBABILITY, "pairs": PAIRS, "choice": CHOICE}[kind][0]
    path = tmp_path / "p.jsonl"
    path.write_text(f"{json.dumps(good)}\n\n{line}\n")
    with pytest.raises(DataError) as caught:
        read_questions(ProbeConfig(name="p", kind=kind, url=str(path)))
    assert f"{path}:3 is no question of kind {kind!r}" in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"sets": [{"urls": ["a"]}]}, "needs another name"),
        ({"sets": [{"name": "a", "urls": ["a"]}, {"name": "a", "urls": ["b"]}]}, r"eval.sets\[1\] needs another name"),
        ({"sets": [{"name": "a"}]}, "has no urls"),
        ({"sets": [{"name": "a", "urls": ["a"], "kind": "csv"}]}, r"eval.sets\[0\].kind is unknown"),
        ({"sets": [{"name": "a", "urls": ["a"], "end": 3}]}, r"eval.sets\[0\].end has no effect"),
        ({"sets": [{"name": "a", "urls": ["a"], "batches": -1}]}, "batches is too small"),
        ({"sets": [{"name": "a", "urls": ["a"], "weight": 1}]}, "unknown setting"),
        ({"probes": [{"name": "a"}]}, "has no url"),
        ({"probes": [{"name": "a", "url": "a", "kind": "cloze"}]}, r"eval.probes\[0\].kind is unknown"),
        ({"probes": [{"name": "a", "url": "a", "limit": -1}]}, "limit is too small"),
        ({"start_token": "<s>"}, "eval.start_token has no effect"),
        ({"held_out": False}, "there is nothing to evaluate"),
        ({"every": 0, "probes": [{"name": "a", "url": "a"}]}, "would have no effect in this run"),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other_are_refused(values: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        from_values({"eval": {"every": 1, **values}})


def test_what_cannot_be_evaluated_is_known_at_the_start(tmp_path: Path) -> None:
    config = run_of(tmp_path)
    with pytest.raises(DataError, match="no prepared data"):
        check_evaluation(config)
    prepare(config.data)
    with pytest.raises(DataError, match=r"no prepared data in .*tokens/eval"):
        check_evaluation(config)
    prepare_sets(config)
    check_evaluation(config)
    changed = replace(config.eval.sets[0], key="other")
    with pytest.raises(DataError, match=r"eval\.sets\.sources = "):
        check_evaluation(replace(config, eval=replace(config.eval, sets=(changed, *config.eval.sets[1:]))))
    with pytest.raises(ConfigError, match="has no token '<s>'"):
        check_evaluation(replace(config, eval=replace(config.eval, start_token="<s>")))
    Path(config.eval.probes[1].url).write_text("{}\n")
    with pytest.raises(DataError, match=r"pairs.jsonl:1 is no question"):
        check_evaluation(config)
    Path(config.eval.probes[1].url).write_text("\n")
    with pytest.raises(DataError, match="the probe pairs has no questions"):
        check_evaluation(config)
    Path(config.eval.probes[1].url).unlink()
    with pytest.raises(DataError, match=r"pairs.jsonl cannot be read|No such file"):
        check_evaluation(config)
    tokens = replace(config.data.sources[0], kind="tokens", key="text")
    with pytest.raises(ConfigError, match="the tokenizer of this run is not known"):
        check_evaluation(replace(config, data=replace(config.data, sources=(tokens,))))


def test_settings_survive_toml_and_storage_options_are_neither_shown_nor_recorded(tmp_path: Path) -> None:
    options = {"secret": "s3cret", "endpoint_url": "http://x"}
    tables = {
        "sets": [{"name": "a", "urls": ["s3://me:pass@b/x"], "storage_options": options}],
        "probes": [{"name": "b", "url": "s3://me:pass@b/y", "kind": "pairs", "storage_options": options}],
    }
    config = from_values({"eval": {"every": 3, "start_token": "<s>", **tables}})
    (tmp_path / "run.toml").write_text(to_toml(config))
    assert read_config(tmp_path / "run.toml") == config
    shown = to_toml(without_secrets(config))
    assert "s3cret" not in shown
    assert "pass@" not in shown
    assert "http://x" in shown
    assert "s3cret" not in json.dumps(recorded_values(config))


def test_results_are_plain_values_curves_and_lines() -> None:
    known, unknown = Score(loss=1.0, tokens=9, bits_per_byte=2.0), Score(loss=2.0, tokens=8, bits_per_byte=math.nan)
    figures = {"acc": 0.5, "questions": 4, "cut": 1}
    scores = Scores(held_out={"a": known}, sets={"b": unknown}, probes={"c": figures})
    assert json.loads(json.dumps(plain_scores(scores), allow_nan=False)) == {
        "held_out": {"a": {"loss": 1.0, "perplexity": 2.718282, "bits_per_byte": 2.0, "tokens": 9}},
        "sets": {"b": {"loss": 2.0, "perplexity": 7.389056, "bits_per_byte": None, "tokens": 8}},
        "probes": {"c": figures},
    }
    assert curves_of(scores) == {
        "held out/a loss": 1.0, "held out/a bits per byte": 2.0, "sets/b loss": 2.0, "probes/c acc": 0.5,
    }  # fmt: skip
    assert score_lines(scores)[1:] == [
        "sets: b ppl 7.39 (n/a bits/byte)",
        "probe c: acc 0.5000 (4 questions, 1 texts cut)",
    ]
    assert [line.split() for line in score_table(scores).splitlines()[:3]] == [
        ["tokens", "loss", "perplexity", "bits/byte"],
        ["held", "out", "a", "9", "1.0000", "2.72", "2.000"],
        ["b", "8", "2.0000", "7.39", "n/a"],
    ]


def test_a_run_on_bytes_evaluates_sets_and_probes_without_data_of_sources(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "text")
    data = {"source": source, "holdout_every": 4}
    config = run_config(tmp_path, data=data, eval=write_evaluation(tmp_path / "evaluation"))
    prepare_sets(config)
    check_evaluation(config)
    assert run_vocabulary(config).size == 256
    assert len(open_probes(config, run_vocabulary(config))) == 4
    batch = MixedDataset(sets_of(config), "held", is_sets=True).batch([0])
    assert batch.documents is None  # as such a run trains
    assert torch.equal(batch.tokens[0][:5], torch.tensor(list(TEXTS[0].encode()[:5])))
