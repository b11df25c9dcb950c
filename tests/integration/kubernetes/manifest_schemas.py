"""Cut the schemas of the manifests in docs/ out of the projects' own.

`python tests/integration/kubernetes/manifest_schemas.py CRD.yaml...`, with jobset.x-k8s.io_jobsets.yaml of
kubernetes-sigs/jobset (config/components/crd/bases), kubeflow.org_pytorchjobs.yaml of kubeflow/training-operator 1,
trainer.kubeflow.org_trainjobs.yaml and _trainingruntimes.yaml of kubeflow/trainer (manifests/base/crds), and
elastic.iml.github.io_elasticjobs.yaml of DLRover (go/elasticjob/config/crd/bases).

A manifest is checked against all of its schema; then what the manifest touches is written to tests/format, with the names of
all other fields beside it, for the tests, which run without a network. Needs PyYAML and jsonschema.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft7Validator  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parents[3]
FORMAT = ROOT / "tests" / "format"
MANIFESTS = {
    "ElasticJob": "elasticjob.yaml",
    "JobSet": "jobset.yaml",
    "PyTorchJob": "pytorchjob.yaml",
    "TrainJob": "trainjob.yaml",
    "TrainingRuntime": "trainjob.yaml",
}
KEPT = ("type", "required", "enum", "pattern", "anyOf", "minimum", "maximum", "minLength", "maxLength", "format")


def cut(schema: dict[str, Any], value: Any) -> dict[str, Any]:
    """Return the part of a schema that `value` touches; unknown fields of an object are refused."""
    kept = {name: schema[name] for name in KEPT if name in schema}
    if isinstance(value, dict):
        if "properties" in schema:
            touched = schema["properties"]
            kept["properties"] = {n: cut(sub, value[n]) if n in value else True for n, sub in sorted(touched.items())}
            kept["additionalProperties"] = False
        elif isinstance(more := schema.get("additionalProperties"), dict):
            kept["additionalProperties"] = cut(more, next(iter(value.values())))
    elif isinstance(value, list):
        parts = [cut(schema["items"], item) for item in value]
        kept["items"] = parts[0]
        for part in parts[1:]:
            _join(kept["items"], part)
    return kept


def _join(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Add to a cut what another item of the same list touches."""
    for name, value in other.items():
        if name not in one or one[name] is True:
            one[name] = value
        elif isinstance(value, dict) and isinstance(one[name], dict):
            _join(one[name], value)


def problems(schema: dict[str, Any], manifest: Any) -> list[str]:
    """Return what does not fit, with the place of each."""
    found = Draft7Validator(schema).iter_errors(manifest)
    return sorted(f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in found)


def document(kind: str) -> Any:
    """Return the document of a kind in its manifest of docs/."""
    documents = yaml.safe_load_all((ROOT / "docs" / MANIFESTS[kind]).read_text(encoding="utf-8"))
    (found,) = [one for one in documents if one["kind"] == kind]
    return found


def written_problems(crd: Any) -> list[str]:
    """Check the document that a custom resource definition is about; write its cut where nothing is wrong."""
    kind = crd["spec"]["names"]["kind"]
    manifest = document(kind)
    version = manifest["apiVersion"].rpartition("/")[2]
    (whole,) = [one["schema"]["openAPIV3Schema"] for one in crd["spec"]["versions"] if one["name"] == version]
    labels = {"type": "object", "additionalProperties": {"type": "string"}}
    whole["properties"]["metadata"] = {"type": "object", "properties": {"name": {"type": "string"}, "labels": labels}}
    schema = cut(whole, manifest)
    bad = problems(whole, manifest) + problems(schema, manifest)
    if not bad:
        path = FORMAT / f"{kind.lower()}-{version}.json"
        path.write_text(json.dumps(schema, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return bad


def main() -> int:
    bad = [one for path in sys.argv[1:] for one in written_problems(yaml.safe_load(Path(path).read_text("utf-8")))]
    sys.stdout.write("\n".join(bad or ["the manifests fit; their schemas are written"]) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
