"""docs/launching.md and docs/jobset.yaml against the code: options, exit codes, variables, manifest, batch script."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from flashckpt import errors
from flashckpt.daemon import run, zygote

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "launching.md").read_text()


def own_options() -> set[str]:
    from torch.distributed import run as torchrun

    theirs = set(torchrun.get_args_parser()._option_string_actions)
    return {name for name in run.get_args_parser()._option_string_actions if name not in theirs and "_" not in name}


def test_every_option_of_dlruns_own_is_in_the_page() -> None:
    assert [name for name in own_options() if name not in TEXT] == []


def test_exit_codes_of_the_page_are_those_of_the_code() -> None:
    assert f"| {errors.RESUME_EXIT_CODE} | stopped on request" in TEXT
    assert f"| {errors.RestartBudgetError.exit_code} | the same error" in TEXT
    assert f"| {errors.HangError.exit_code} | the ranks hang" in TEXT


def test_variables_of_the_page_are_those_of_the_code() -> None:
    source = "".join(path.read_text() for path in (ROOT / "daemon").glob("*.py"))
    source += "".join(path.read_text() for path in (ROOT / "flashckpt").rglob("*.py"))
    named = set(re.findall(r"FLASHCKPT_[A-Z_]+", TEXT))
    assert named
    assert [name for name in named if name not in source] == []
    assert all(any(prefix in TEXT for prefix in (name, name.rstrip("_"))) for name in zygote.IMPORT_TIME[:2])


def test_tests_of_the_failure_table_exist() -> None:
    for file, name in re.findall(r"\| (test_\w+|nodes\.py): (\w+)", TEXT):
        path = ROOT / "tests" / (file if file.endswith(".py") else f"{file}.py")
        assert re.search(rf"^def test_\w*{name}", path.read_text(), re.MULTILINE), (file, name)


def test_batch_script_is_valid_shell(tmp_path: Path) -> None:
    block = TEXT.split("## Slurm\n\n")[1].split("\n\n`SLURM", 1)[0].split("\n\nThe job id", 1)[0]
    script = tmp_path / "job.sbatch"
    script.write_text(re.sub(r"^    ", "", block, flags=re.MULTILINE))
    assert script.read_text().startswith("#!/bin/bash")
    subprocess.run(["bash", "-n", script], check=True)
    assert "--requeue" in script.read_text()


SHAPE: dict[
    str, Any
] = {  # field -> allowed type, {...} for an object, [x] for a list of x: batch/v1 and JobSet v1alpha2
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str},
    "spec": {
        "network": {"enableDNSHostnames": bool},
        "failurePolicy": {"maxRestarts": int},
        "replicatedJobs": [
            {
                "name": str,
                "replicas": int,
                "template": {
                    "spec": {
                        "completionMode": str,
                        "completions": int,
                        "parallelism": int,
                        "backoffLimit": int,
                        "podFailurePolicy": {
                            "rules": [
                                {
                                    "action": str,
                                    "onExitCodes": {"containerName": str, "operator": str, "values": [int]},
                                    "onPodConditions": [{"type": str, "status": str}],
                                }
                            ]
                        },
                        "template": {
                            "spec": {
                                "restartPolicy": str,
                                "subdomain": str,
                                "terminationGracePeriodSeconds": int,
                                "containers": [
                                    {
                                        "name": str,
                                        "image": str,
                                        "command": [str],
                                        "env": [{"name": str, "valueFrom": {"fieldRef": {"fieldPath": str}}}],
                                        "ports": [{"containerPort": int}],
                                        "resources": {"limits": {"memory": str}},
                                        "volumeMounts": [{"name": str, "mountPath": str}],
                                    }
                                ],
                                "volumes": [
                                    {
                                        "name": str,
                                        "emptyDir": {"medium": str, "sizeLimit": str},
                                        "persistentVolumeClaim": {"claimName": str},
                                    }
                                ],
                            }
                        },
                    }
                },
            }
        ],
    },
}


def misfits(value: Any, shape: Any, where: str = "") -> list[str]:
    """Return the paths of unknown fields and of values of the wrong type."""
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return [f"{where}: an object is expected"]
        unknown = [f"{where}.{name}: unknown" for name in value if name not in shape]
        return unknown + [
            bad for name in value if name in shape for bad in misfits(value[name], shape[name], f"{where}.{name}")
        ]
    if isinstance(shape, list):
        if not isinstance(value, list) or not value:
            return [f"{where}: a list is expected"]
        return [bad for i, item in enumerate(value) for bad in misfits(item, shape[0], f"{where}[{i}]")]
    return [] if type(value) is shape else [f"{where}: {shape.__name__} is expected, found {value!r}"]


def test_jobset_manifest_has_known_fields_and_a_command_that_dlrun_accepts() -> None:
    yaml = pytest.importorskip("yaml")
    manifest = yaml.safe_load((ROOT / "docs" / "jobset.yaml").read_text())
    assert misfits(manifest, SHAPE) == []
    assert misfits({"spec": {"netwrk": {}}}, SHAPE) == [".spec.netwrk: unknown"]
    (job,) = manifest["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert container["command"][0] == "dlrun"
    args = run.parse_args(container["command"][1:])
    assert args.grace_timeout < spec["template"]["spec"]["terminationGracePeriodSeconds"]
    codes = [rule["onExitCodes"]["values"] for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert codes[0] == [errors.RESUME_EXIT_CODE]
    assert errors.RestartBudgetError.exit_code in codes[1]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    memory = next(v for v in spec["template"]["spec"]["volumes"] if v["name"] == mounts["/dev/shm"])
    assert memory["emptyDir"]["medium"] == "Memory"
    host = f"{manifest['metadata']['name']}-{job['name']}-0-0.{spec['template']['spec']['subdomain']}"
    assert args.rdzv_endpoint.split(":")[0] == host
