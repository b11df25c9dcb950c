"""`flashckpt plan` as a user calls it: advice, provenance, bad arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from flashckpt.commands.quantity import parse_duration, parse_scale, parse_size, show_bytes, show_rate, show_s
from flashckpt.errors import ConfigError, FlashckptError, FormatVersionError, LayoutError
from flashckpt.plan.command import plan

BASE = ["--gpus", "16384", "--layout", "llama3-405b"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(plan, list(arguments))


def document(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json", "-")
    assert result.exit_code == 0, result.output
    loaded: dict[str, Any] = json.loads(result.output)
    return loaded


def test_advice_names_intervals_goodput_needs_and_every_assumption() -> None:
    result = run(*BASE, "--mtbf", "50000h")
    assert result.exit_code == 0, result.output
    for words in (
        "snapshot every",
        "persist every",
        "goodput",
        "host memory per node",
        "to keep up",
        "assumed",
        "Young",
    ):
        assert words in result.output
    assert "100,000" in result.output


def test_goodput_of_the_plan_is_that_of_its_parts() -> None:
    made = document(*BASE)["intervals"]
    assert made["goodput"] + made["stall"] + made["recompute"] + made["restart"] == pytest.approx(1)


def test_tensors_of_a_rank_are_the_layouts_or_those_that_are_given() -> None:
    own, given = document(*BASE), document(*BASE, "--rows", "20")
    assert own["state"]["rank_rows"] > given["state"]["rank_rows"] == 20
    assert own["coordination"]["commit_s"] > given["coordination"]["commit_s"]
    assert "for 20 tensors per rank" in run(*BASE, "--rows", "20").output


def test_needs_follow_from_the_layout() -> None:
    made = document(*BASE, "--keep-last", "2", "--slots", "2")
    assert made["layout"]["dp"] == 64
    state, needs = made["state"], made["needs"]
    assert state["checkpoint_bytes"] == pytest.approx(405.85e9 * 14, rel=1e-3)
    # bf16 weights over tp x pp, optimizer over all ranks; the first stage has four layers and the embedding
    assert state["rank_bytes"] == pytest.approx(405.85e9 * (2 / 256 + 12 / 16384), rel=0.25)
    assert needs["host_memory_node_bytes"] == 2 * 8 * state["rank_bytes"]
    assert needs["storage_bytes"] == 3 * state["checkpoint_bytes"]
    assert needs["storage_bytes_per_s"] == pytest.approx(state["checkpoint_bytes"] / made["intervals"]["persist_s"])


def test_given_costs_win_over_measured_over_assumed(tmp_path: Path) -> None:
    bench = tmp_path / "bench.json"
    rates = {"write_bytes_per_s": 3e9, "copy_bytes_per_s": 5e9}
    bench.write_text(json.dumps({"schema": 1, "kind": "job", "time": "today", "results": {"rates": rates}}))
    made = document(*BASE, "--from", str(bench), "--copy-rate", "7GB", "--stall", "40ms")
    assert made["rates"]["write_bytes_per_s"] == 3e9
    assert made["rates"]["copy_bytes_per_s"] == 7e9
    assert made["costs"]["stall_s"] == 0.04
    assert "measured by bench job" in made["rates"]["sources"]["write_bytes_per_s"]
    assert made["rates"]["sources"]["copy_bytes_per_s"] == "given"
    assert "read_bytes_per_s" not in made["rates"]["sources"]
    assert made["given"] == ["stall_s"]


def test_result_under_load_is_said_in_the_plan(tmp_path: Path) -> None:
    bench = tmp_path / "bench.json"
    results = {"rates": {"write_bytes_per_s": 3e9}}
    bench.write_text(json.dumps({"schema": 1, "kind": "store", "load": {"loaded": True}, "results": results}))
    assert "under load" in run(*BASE, "--from", str(bench)).output


def test_storage_that_all_nodes_share_bounds_the_persist() -> None:
    free, shared = document(*BASE), document(*BASE, "--storage-rate", "100GB")
    data_s = shared["costs"]["persist_s"] - shared["coordination"]["seconds"]
    assert data_s == pytest.approx(5682 / 100, rel=0.01)
    assert shared["costs"]["persist_s"] > free["costs"]["persist_s"]
    assert shared["intervals"]["persist_s"] >= shared["costs"]["persist_s"]


def test_steps_make_whole_intervals() -> None:
    made = document(*BASE, "--step-time", "7s")["intervals"]
    assert made["snapshot_s"] == pytest.approx(7 * made["snapshot_steps"])


def test_picture_and_json_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture, text = tmp_path / "goodput.png", tmp_path / "plan.json"
    assert run(*BASE, "--plot", str(picture), "--json", str(text)).exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads(text.read_text())["kind"] == "plan"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--gpus", "0"],
        ["--gpus", "-8"],
        ["--gpus", "99999999999"],
        ["--gpus", "1000"],  # not a multiple of tp x pp
        ["--tp", "0"],
        ["--pp", "4096"],
        ["--mtbf", "0h"],
        ["--mtbf", "-5h"],
        ["--mtbf", "50000"],  # no unit
        ["--mtbf", "nanh"],
        ["--storage-share", "1.5"],
        ["--slots", "1"],
        ["--keep-last", "0"],
        ["--request-time", "5"],
        ["--write-rate", "0GB"],
        ["--write-rate", "fast"],
        ["--from", "/nonexistent.json"],
        ["--plot", "/nonexistent/x.png"],
        ["--plot", "x.docx"],
    ],
    ids=" ".join,
)
def test_absurd_argument_is_one_clear_error(arguments: list[str]) -> None:
    result = run(*BASE, *arguments)
    assert isinstance(result.exception, FlashckptError), result.output
    assert isinstance(result.exception, (ConfigError, LayoutError))
    assert result.exception.found or result.exception.expected
    assert not result.output


def test_result_of_a_newer_program_or_without_rates_is_refused(tmp_path: Path) -> None:
    bench = tmp_path / "bench.json"
    bench.write_text(json.dumps({"schema": 99, "results": {}}))
    assert isinstance(run(*BASE, "--from", str(bench)).exception, FormatVersionError)
    bench.write_text(json.dumps({"schema": 1, "kind": "x", "results": {}}))
    assert "no rates" in str(run(*BASE, "--from", str(bench)).exception)


def test_quantities_need_units_and_show_them() -> None:
    assert parse_duration("1.5h") == 5400
    assert parse_duration("250ms") == 0.25
    assert parse_size("256MiB") == 256 << 20
    assert parse_size("1GB") == 10**9
    assert parse_scale("1/64") == 1 / 64
    for text in ("", "5", "h", "1e99h", "1 hour", "-1s", "inf s"):
        with pytest.raises(ConfigError):
            parse_duration(text)
    for text in ("0", "1/0", "2", "-1/2", "x", "nan"):
        with pytest.raises(ConfigError):
            parse_scale(text)
    assert show_s(0.0032) == "3.2 ms"
    assert show_s(float("inf")) == "never"
    assert show_bytes(105 * 2**30) == "112.7 GB (105 GiB)"
    assert show_rate(10**9) == "1 GB/s (0.931 GiB/s)"


def test_agreement_and_commit_are_part_of_a_persist_and_slower_requests_make_it_longer() -> None:
    many = [*BASE, "--request-rate", "1000000000"]
    near, far = document(*many, "--request-time", "5ms"), document(*many, "--request-time", "100ms")
    for made in (near, far):
        data_s = made["costs"]["persist_s"] - made["coordination"]["seconds"]
        assert data_s == pytest.approx(near["costs"]["persist_s"] - near["coordination"]["seconds"])
        assert [row["coordination_s"] for row in made["sizes"] if row["gpus"] == 16384] == [
            made["coordination"]["seconds"]
        ]
    slower_s = far["coordination"]["seconds"] - near["coordination"]["seconds"]
    assert slower_s > 20 * (0.1 - 0.005), "each of the requests that follow one another takes longer"
    given = document(*BASE, "--persist", "30s")
    assert given["costs"]["persist_s"] == 30, "what was measured has it in it"


def test_no_interval_of_the_plan_is_shorter_than_the_requests_of_a_persist_take() -> None:
    for rate in ("100", "3500", "1000000"):
        made = document(*BASE, "--request-rate", rate)
        assert made["intervals"]["persist_s"] >= max(made["coordination"]["least_s"], made["costs"]["persist_s"])
        each = {row["factor"]: row["persist_goodput"] for row in made["wrong_interval"]}
        assert each[0.1] <= made["intervals"]["goodput"] + 1e-3
    assert "requests: 1,000 per second given" in run(*BASE, "--request-rate", "1000").output


def test_walls_are_part_of_the_advice() -> None:
    result = run(*BASE)
    assert "MANIFEST is larger than 150 MB: at no size up to 131,072 GPUs" in result.output
    assert "until the nodes agree" in result.output
