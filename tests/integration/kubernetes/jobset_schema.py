"""Cut the schema of docs/jobset.yaml out of JobSet's own: `python tests/integration/kubernetes/jobset_schema.py CRD.yaml`.

CRD.yaml is config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml of a kubernetes-sigs/jobset checkout. The manifest is
checked against all of it; then what the manifest touches is written to tests/format/jobset-v1alpha2.json, with the names of
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
SCHEMA = ROOT / "tests" / "format" / "jobset-v1alpha2.json"
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


def main() -> int:
    crd = yaml.safe_load(Path(sys.argv[1]).read_text(encoding="utf-8"))
    (whole,) = [one["schema"]["openAPIV3Schema"] for one in crd["spec"]["versions"] if one["name"] == "v1alpha2"]
    whole["properties"]["metadata"] = {"type": "object", "properties": {"name": {"type": "string"}}}
    manifest = yaml.safe_load((ROOT / "docs" / "jobset.yaml").read_text(encoding="utf-8"))
    schema = cut(whole, manifest)
    bad = problems(whole, manifest) + problems(schema, manifest)
    sys.stdout.write("\n".join(bad) + "\n" if bad else f"docs/jobset.yaml fits; {SCHEMA} is written\n")
    if not bad:
        SCHEMA.write_text(json.dumps(schema, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
