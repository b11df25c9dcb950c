"""docs/launching.md and docs/jobset.yaml against the code: options, exit codes, variables, manifest, batch script."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT

from flashckpt import errors
from flashckpt.daemon.launcher import cli
from flashckpt.daemon.zygote import server

TEXT = (ROOT / "docs" / "launching.md").read_text()


def own_options() -> set[str]:
    from torch.distributed import run as torchrun

    theirs = set(torchrun.get_args_parser()._option_string_actions)
    return {name for name in cli.get_args_parser()._option_string_actions if name not in theirs and "_" not in name}


def test_every_option_of_dlruns_own_is_in_the_page() -> None:
    assert [name for name in own_options() if name not in TEXT] == []


def test_exit_codes_of_the_page_are_those_of_the_code() -> None:
    assert f"| {errors.RESUME_EXIT_CODE} | stopped on request" in TEXT
    assert f"| {errors.RestartBudgetError.exit_code} | the same error" in TEXT
    assert f"| {errors.HangError.exit_code} | the ranks hang" in TEXT


def test_variables_of_the_page_are_those_of_the_code() -> None:
    source = "".join(path.read_text() for path in (ROOT / "daemon").rglob("*.py"))
    source += "".join(path.read_text() for path in (ROOT / "flashckpt").rglob("*.py"))
    named = set(re.findall(r"FLASHCKPT_[A-Z_]+", TEXT))
    assert named
    assert [name for name in named if name not in source] == []
    assert all(any(prefix in TEXT for prefix in (name, name.rstrip("_"))) for name in server.IMPORT_TIME[:2])


def test_tests_of_the_failure_table_exist() -> None:
    for file, name in re.findall(r"[|,(] ?(test_\w+|nodes\w*\.py): (\w+)", TEXT):
        path = next((ROOT / "tests").rglob(file if file.endswith(".py") else f"{file}.py"))
        assert re.search(rf"^def test_\w*{name}", path.read_text(), re.MULTILINE), (file, name)


def test_batch_scripts_are_valid_shell_and_their_commands_are_accepted(tmp_path: Path) -> None:
    """`make test-slurm` runs them; this needs no Slurm."""
    scripts = re.findall(r"```bash\n(#!/bin/bash\n.*?)```", TEXT, re.DOTALL)
    assert len(scripts) == 2
    for text in scripts:
        script = tmp_path / "job.sbatch"
        script.write_text(text)
        subprocess.run(["bash", "-n", script], check=True)
        assert "--requeue" in text
        assert "--exclusive" in text
        (command,) = re.findall(r"dlrun (--.*?) &$", text.replace("\\\n", ""), re.MULTILINE)
        sizes = command.replace('"$SLURM_NNODES"', "2").replace('"$SLURM_GPUS_ON_NODE"', "2")
        args = cli.parse_args(shlex.split(sizes))
        (ahead_s,) = re.findall(r"--signal=B:TERM@(\d+)", text)
        assert args.grace_timeout < int(ahead_s)


def manifest_and_problems(change: Callable[[Any], None] = lambda manifest: None) -> tuple[Any, list[str]]:
    """docs/jobset.yaml against the fields of JobSet's own schema (tests/integration/kubernetes/jobset_schema.py cuts it out of the CRD)."""
    yaml, jsonschema = pytest.importorskip("yaml"), pytest.importorskip("jsonschema")
    manifest = yaml.safe_load((ROOT / "docs" / "jobset.yaml").read_text())
    change(manifest)
    schema = json.loads((ROOT / "tests" / "format" / "jobset-v1alpha2.json").read_text())
    return manifest, [error.message for error in jsonschema.Draft7Validator(schema).iter_errors(manifest)]


def pod(manifest: Any) -> Any:
    return manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m["spec"].update(netwrk={}), "'netwrk' was unexpected"),
        (lambda m: pod(m).update(terminationGracePeriodSeconds="2m"), "'2m' is not of type 'integer'"),
        (lambda m: pod(m)["containers"][0].pop("name"), "'name' is a required property"),
        (lambda m: pod(m)["containers"][0].update(commands=[]), "'commands' was unexpected"),
        (lambda m: m["spec"]["failurePolicy"]["rules"][0].update(action="FailJob"), "'FailJob' is not one of"),
        (lambda m: m["spec"]["failurePolicy"]["rules"][0].pop("name"), "'name' is a required property"),
        (lambda m: m["spec"]["replicatedJobs"][0].pop("template"), "'template' is a required property"),
    ],
)
def test_wrong_manifest_is_refused(change: Callable[[Any], None], says: str) -> None:
    _, problems = manifest_and_problems(change)
    assert any(says in problem for problem in problems), problems


def test_jobset_manifest_fits_jobsets_schema_and_has_a_command_that_dlrun_accepts() -> None:
    manifest, problems = manifest_and_problems()
    assert problems == []
    (job,) = manifest["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert container["command"][0] == "dlrun"
    args = cli.parse_args(container["command"][1:])
    assert args.grace_timeout < spec["template"]["spec"]["terminationGracePeriodSeconds"]
    codes = [rule["onExitCodes"]["values"] for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert codes[0] == [errors.RESUME_EXIT_CODE]
    assert errors.RestartBudgetError.exit_code in codes[1]
    rules = manifest["spec"]["failurePolicy"]["rules"]  # else JobSet restarts what its podFailurePolicy has failed
    assert [(rule["action"], rule["onJobFailureReasons"]) for rule in rules] == [("FailJobSet", ["PodFailurePolicy"])]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(args.nproc_per_node)
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    memory = next(v for v in spec["template"]["spec"]["volumes"] if v["name"] == mounts["/dev/shm"])
    assert memory["emptyDir"]["medium"] == "Memory"
    host = f"{manifest['metadata']['name']}-{job['name']}-0-0.{spec['template']['spec']['subdomain']}"
    assert args.rdzv_endpoint.split(":")[0] == host
