"""docs/launching.md, docs/jobset.yaml and docs/trainjob.yaml against the code: options, exit codes, variables, manifest, batch script."""

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
from flashckpt.trainer.config import read_config
from flashckpt.trainer.dry_run.command import describe
from flashckpt.trainer.dry_run.options import DryRunOptions

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


def documents(file: str) -> dict[str, Any]:
    """The documents of a manifest in docs/ by kind."""
    yaml = pytest.importorskip("yaml")
    return {one["kind"]: one for one in yaml.safe_load_all((ROOT / "docs" / file).read_text())}


def problems(manifest: Any) -> list[str]:
    """A manifest against the fields of the project's own schema (tests/integration/kubernetes/manifest_schemas.py cuts it out)."""
    jsonschema = pytest.importorskip("jsonschema")
    name = f"{manifest['kind'].lower()}-{manifest['apiVersion'].rpartition('/')[2]}.json"
    schema = json.loads((ROOT / "tests" / "format" / name).read_text())
    return [error.message for error in jsonschema.Draft7Validator(schema).iter_errors(manifest)]


def job_named(jobset: Any, name: str) -> Any:
    (found,) = [job for job in jobset["replicatedJobs"] if job["name"] == name]
    return found


def pod(manifest: Any) -> Any:
    return job_named(manifest["spec"], "node")["template"]["spec"]["template"]["spec"]


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
    manifest = documents("jobset.yaml")["JobSet"]
    change(manifest)
    found = problems(manifest)
    assert any(says in problem for problem in found), found


def trainer_volumes(jobset: Any) -> list[Any]:
    volumes: list[Any] = job_named(jobset, "node")["template"]["spec"]["template"]["spec"]["volumes"]
    return volumes


def require_safe_jobs(jobset: Any, args: Any) -> Any:
    """What both manifests promise of their jobs; returns the container of the trainer."""
    job = job_named(jobset, "node")
    spec = job["template"]["spec"]
    pods = spec["template"]["spec"]
    (container,) = pods["containers"]
    assert args.grace_timeout < pods["terminationGracePeriodSeconds"]
    exits = [rule["onExitCodes"] for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert {one["containerName"] for one in exits} == {container["name"]}
    assert exits[0]["values"] == [errors.RESUME_EXIT_CODE]
    assert errors.RestartBudgetError.exit_code in exits[1]["values"]
    rules = jobset["failurePolicy"]["rules"]  # else JobSet restarts what its podFailurePolicy has failed
    assert [(rule["action"], rule["onJobFailureReasons"]) for rule in rules] == [("FailJobSet", ["PodFailurePolicy"])]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pods["volumes"]}
    assert set(mounts.values()) == set(volumes)
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert job["dependsOn"] == [{"name": "prepare", "status": "Complete"}]
    return container


def require_trainer(files: dict[str, Any], jobset: Any, args: Any, tmp_path: Path) -> None:
    """The product's trainer with the run of the ConfigMap, whose folders are mounted where it says."""
    assert (args.module, args.training_script) == (True, "flashckpt.trainer")
    assert args.training_script_args == ["--config", "/etc/run/run.toml"]
    path = tmp_path / "run.toml"
    path.write_text(files["ConfigMap"]["data"]["run.toml"])
    config = read_config(path)
    limit = next(v["emptyDir"]["sizeLimit"] for v in trainer_volumes(jobset) if "emptyDir" in v)
    for world in (2 * int(args.nproc_per_node), int(args.nproc_per_node)):  # all nodes, and one of two lost
        found = describe(config, DryRunOptions(world=world, ranks_per_node=int(args.nproc_per_node)))
        assert found["snapshots"]["node_bytes"] <= int(limit.removesuffix("Gi")) << 30
    for name in ("prepare", "node"):
        pods = job_named(jobset, name)["template"]["spec"]["template"]["spec"]
        mounts = {mount["mountPath"] for mount in pods["containers"][0]["volumeMounts"]}
        assert mounts >= {"/etc/run", "/data", "/checkpoints"}
        assert {"name": "run", "configMap": {"name": files["ConfigMap"]["metadata"]["name"]}} in pods["volumes"]
    command = job_named(jobset, "prepare")["template"]["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command == [
        *["python", "-m", "flashckpt.trainer", "data", "prepare", "--config"],
        args.training_script_args[1],
    ]
    places = [config.data.folder, config.checkpoint.root, config.log.folder, *config.data.sources[0].urls]
    assert all(str(place).startswith(("/checkpoints/", "/data/")) for place in places)


def test_jobset_manifest_fits_jobsets_schema_and_has_a_command_that_dlrun_accepts(tmp_path: Path) -> None:
    files = documents("jobset.yaml")
    manifest = files["JobSet"]
    assert problems(manifest) == []
    (container,) = pod(manifest)["containers"]
    assert container["command"][0] == "dlrun"
    args = cli.parse_args(container["command"][1:])
    require_safe_jobs(manifest["spec"], args)
    require_trainer(files, manifest["spec"], args, tmp_path)
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(args.nproc_per_node)
    host = f"{manifest['metadata']['name']}-node-0-0.{pod(manifest)['subdomain']}"
    assert args.rdzv_endpoint.split(":")[0] == host


def test_trainjob_manifest_fits_kubeflows_schemas_and_dlrun_obeys_its_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = documents("trainjob.yaml")
    runtime, job = files["TrainingRuntime"], files["TrainJob"]
    assert problems(runtime) + problems(job) == []
    trainer = job["spec"]["trainer"]
    # what Kubeflow Trainer's torch plugin gives the container `node` of the job that carries its label
    name = job["metadata"]["name"]
    given = {"NNODES": "2", "NPROC_PER_NODE": "2", "NODE_RANK": "1", "MASTER_ADDR": f"{name}-node-0-0.{name}"}
    for variable, value in (given | {"MASTER_PORT": "29400"}).items():
        monkeypatch.setenv(f"PET_{variable}", value)
    assert trainer["command"] == ["dlrun"]
    args = cli.parse_args(trainer["args"])
    assert (args.nnodes, args.nproc_per_node, args.rdzv_backend) == ("1:2", "2", "c10d")
    assert args.rdzv_endpoint == f"{name}-node-0-0.{name}:29400"
    jobset = runtime["spec"]["template"]["spec"]
    container = require_safe_jobs(jobset, args)
    require_trainer(files, jobset, args, tmp_path)
    labels = job_named(jobset, "node")["template"]["metadata"]["labels"]
    assert (labels, container["name"]) == ({"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}, "node")
    assert job["spec"]["runtimeRef"] == {"name": runtime["metadata"]["name"], "kind": runtime["kind"]}
    assert (
        trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == trainer["numProcPerNode"] == int(args.nproc_per_node)
    )
    assert str(trainer["numNodes"]) == args.nnodes.partition(":")[2]


def test_pytorchjob_manifest_fits_kubeflows_schema_and_dlrun_reads_what_the_operator_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = documents("pytorchjob.yaml")["PyTorchJob"]
    assert problems(job) == []
    policy, worker = job["spec"]["elasticPolicy"], job["spec"]["pytorchReplicaSpecs"]["Worker"]
    pods = worker["template"]["spec"]
    (container,) = pods["containers"]
    assert (container["name"], worker["restartPolicy"]) == ("pytorch", "OnFailure")
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    given = {
        "NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}",
        "RDZV_BACKEND": policy["rdzvBackend"],
        "RDZV_ENDPOINT": f"{job['metadata']['name']}-worker-0:{ports['pytorchjob-port']}",
    }
    for name, value in given.items():
        monkeypatch.setenv(f"PET_{name}", value)
        assert f"PET_{name}={value}" in (ROOT / "docs/pytorchjob.yaml").read_text() or name == "RDZV_BACKEND"
    assert container["command"][0] == "dlrun"
    args = cli.parse_args(container["command"][1:])
    assert {"NNODES": args.nnodes, "RDZV_BACKEND": args.rdzv_backend, "RDZV_ENDPOINT": args.rdzv_endpoint} == given
    assert args.grace_timeout < pods["terminationGracePeriodSeconds"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(args.nproc_per_node)
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pods["volumes"]}
    assert set(mounts.values()) == set(volumes)
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"


def test_elasticjob_manifest_fits_dlrovers_schema_and_dlrun_takes_its_command() -> None:
    job = documents("elasticjob.yaml")["ElasticJob"]
    assert problems(job) == []
    worker = job["spec"]["replicaSpecs"]["worker"]
    pods = worker["template"]["spec"]
    (container,) = pods["containers"]
    assert (container["name"], container["command"][0]) == ("main", "dlrun")
    args = cli.parse_args(container["command"][1:])
    assert (args.nnodes, args.rdzv_backend) == (f"1:{worker['replicas']}", "c10d")
    assert (
        args.rdzv_endpoint == f"{job['metadata']['name']}-edljob-worker-0:3333"
    )  # as DLRover names a worker's service
    assert args.grace_timeout < pods["terminationGracePeriodSeconds"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(args.nproc_per_node)
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pods["volumes"]}
