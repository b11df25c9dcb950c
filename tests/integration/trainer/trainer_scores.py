"""`--evaluate`: a finished run scored again without training, from its checkpoint or from elsewhere, in any layout."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import warm
from support.evaluation import write_evaluation
from support.ranks import run_ranks, values
from support.training import run_config, run_rank, write_corpus

from flashckpt.core.settings import Settings
from flashckpt.errors import NoCheckpointError
from flashckpt.trainer.config import RunConfig, from_values, to_toml, to_values
from flashckpt.trainer.evaluate.command import evaluate
from flashckpt.trainer.evaluate.results import plain_scores
from flashckpt.trainer.hub.start import with_model_of_weights
from flashckpt.trainer.scored.sets import prepare_sets


def run_of(folder: Path, **parallel: Any) -> RunConfig:
    return run_config(
        folder,
        parallel=parallel,
        data={"source": [f"even={folder}/text/a/*.txt"], "holdout_every": 4},
        checkpoint={
            "root": str(folder / "root"),
            "job": f"scores-{folder.name}",
            "snapshot_every": 2,
            "persist_every": 100,  # the last step of a run is on storage whatever this is
        },
        eval={**write_evaluation(folder / "evaluation"), "every": 4},
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: Any) -> tuple[Path, Any]:
    """A run of four steps on two ranks, two and two: it has both checkpoints. And what it wrote of its last evaluation."""
    folder = tmp_path_factory.mktemp("scores")
    write_corpus(folder / "text")
    config = run_of(folder)
    prepare_sets(config)
    for part in (replace(config, train=replace(config.train, steps=2)), config):  # each waits for its last commit
        assert values(run_ranks(run_rank, 2, to_values(part), timeout_s=100)) == [0, 0]
    (line,) = (folder / "log" / "eval.jsonl").read_text().splitlines()
    return folder, json.loads(line)


def command(folder: Path, config: RunConfig, *words: str) -> Any:
    (folder / "run.toml").write_text(to_toml(config))
    return warm.run(["-m", "flashckpt.trainer", "--config", str(folder / "run.toml"), *words], folder)


def evaluate_rank(_rank: int, config_values: Any) -> Any:
    scores, where = evaluate(from_values(config_values))
    return plain_scores(scores), where


def check_scores(mine: Any, wanted: Any) -> None:
    for part in ("held_out", "sets", "probes"):
        for name, figures in wanted[part].items():
            assert mine[part][name] == pytest.approx(figures, abs=5e-5), (
                part,
                name,
            )  # a rank may be told "n/a" as None


def test_a_root_alone_is_evaluated_from_anywhere(trained: Any, tmp_path: Path) -> None:
    """Neither model nor data is named, and the process runs in another folder."""
    folder, wanted = trained
    settings = {"eval": {**write_evaluation(tmp_path / "evaluation"), "every": 4}, "train": {"device": "cpu"}}
    config = from_values({**settings, "checkpoint": {"root": str(folder / "root")}})
    alone = with_model_of_weights(config, is_evaluated=True)
    assert alone.model == run_of(folder).model
    assert alone.data.folder != config.data.folder
    (found, _) = values(run_ranks(evaluate_rank, 1, to_values(alone), timeout_s=100))[0]
    assert "held_out" not in found
    check_scores({**found, "held_out": wanted["held_out"]}, wanted)
    recorded = with_model_of_weights(replace(config, eval=replace(config.eval, sets=(), probes=())), is_evaluated=True)
    assert [one.name for one in recorded.eval.sets] == ["stories", "flat"], "those of the run"
    done = warm.run(["-m", "flashckpt.trainer", "--evaluate", "--checkpoint.root", str(folder / "root")], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "stories" in done.stdout


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}), "tp2": (2, {"tp": 2}), "DualPipeV": (2, {"pp": 2, "schedule": "DualPipeV"}),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_checkpoint_scores_in_any_layout_what_the_run_scored(name: str, trained: Any) -> None:
    world, parallel = LAYOUTS[name]
    folder, wanted = trained
    ranks = values(run_ranks(evaluate_rank, world, to_values(run_of(folder, **parallel)), timeout_s=100))
    for scores, where in ranks:
        check_scores(scores, wanted)
        assert "step-" in where


def test_the_command_prints_a_table_and_writes_nothing(trained: Any) -> None:
    folder, wanted = trained
    before = {path: path.stat().st_mtime_ns for path in (folder / "log").rglob("*")}
    done = command(folder, run_of(folder), "--evaluate", "--eval.every", "0")
    assert done.returncode == 0, done.stderr
    where, header, *rows = done.stdout.splitlines()
    assert f"{folder}/root" in where
    tokens = [one["tokens"] for one in (*wanted["held_out"].values(), *wanted["sets"].values())]
    assert header.split() == ["tokens", "loss", "perplexity", "bits/byte"]
    assert f"{wanted['sets']['stories']['loss']:.3f}" in done.stdout
    assert [row.split()[-4] for row in rows[:3]] == [f"{n:,}" for n in tokens]
    assert [row.partition(":")[0] for row in rows[3:]] == ["probability", "pairs", "choice", "one text"]
    assert {path: path.stat().st_mtime_ns for path in (folder / "log").rglob("*")} == before


def test_a_step_names_the_checkpoint(trained: Any, tmp_path: Path) -> None:
    folder, _ = trained
    steps = sorted(int(path.name[5:].partition(".")[0]) for path in (folder / "root").glob("step-*"))
    assert len(steps) > 1, "the run keeps several checkpoints"
    step = str(steps[-2])
    done = command(folder, run_of(folder), "--evaluate", "--step", step)
    assert done.returncode == 0, done.stderr
    assert step in done.stdout.splitlines()[0].rpartition("step-")[2]
    # init.from is there, and is not taken in place of a step that is not
    config = run_of(folder)
    config = replace(config, init=replace(config.init, from_=config.checkpoint.root))
    done = command(folder, config, "--evaluate", "--step", "999")
    assert done.returncode == NoCheckpointError.exit_code, done.stderr
    assert "has no checkpoint of step 999" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_step_without_a_root_is_refused_before_torch_is_there(trained: Any, tmp_path: Path) -> None:
    folder, _ = trained
    config = run_of(folder)
    done = command(tmp_path, replace(config, checkpoint=Settings()), "--evaluate", "--step", "1")
    assert done.returncode == 10, done.stderr
    assert "--step names a checkpoint of no run" in done.stderr


def test_weights_of_another_root_and_sets_alone_need_no_training_data(trained: Any, tmp_path: Path) -> None:
    folder, wanted = trained
    config = run_of(folder)
    config = replace(
        config,
        init=replace(config.init, from_=config.checkpoint.root),
        checkpoint=replace(config.checkpoint, root=str(tmp_path / "empty")),
        eval=replace(config.eval, held_out=False, probes=()),
        data=replace(config.data, source=(f"even={folder}/no such text/*",)),
    )
    done = command(tmp_path, config, "--evaluate")
    assert done.returncode == 0, done.stderr
    assert f"{wanted['sets']['stories']['tokens']:,}" in done.stdout
    assert "held out" not in done.stdout


def test_without_weights_or_with_those_of_another_model_it_ends_with_one_error(trained: Any, tmp_path: Path) -> None:
    folder, _ = trained
    config = run_of(folder)
    nothing = replace(config, checkpoint=replace(config.checkpoint, root=str(tmp_path / "empty")))
    for run, words in (
        (nothing, "there are no weights to evaluate"),
        (replace(config, model=replace(config.model, layers=3)), "holds weights of another model: model.layers"),
    ):
        done = command(tmp_path, run, "--evaluate")
        assert done.returncode == 10, done.stderr
        assert words in done.stderr
        assert "Traceback" not in done.stderr


def test_a_bad_line_of_a_probe_ends_the_run_before_it_trains(trained: Any, tmp_path: Path) -> None:
    folder, _ = trained
    (tmp_path / "bad.jsonl").write_text('{"better": "a", "worse": "b"}\n{"better": "a"}\n')
    config = run_of(folder)
    bad = replace(config.eval.probes[1], url=str(tmp_path / "bad.jsonl"))
    done = command(tmp_path, replace(config, eval=replace(config.eval, probes=(bad,))))
    assert done.returncode == 12, done.stderr
    assert f"{tmp_path}/bad.jsonl:2 is no question of kind 'pairs'" in done.stderr
    assert "Traceback" not in done.stderr
