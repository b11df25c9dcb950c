"""Differences between the run that wrote a checkpoint and the run that resumes it. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashckpt.errors import ConfigError, DataError, SamplerStateError
from flashckpt.trainer.config.run import RunConfig, to_values


def recorded_values(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Return the values recorded with every snapshot: all except storage options, which may hold secrets."""
    values = to_values(config)
    tables = (*values["data"]["sources"], *values["eval"]["sets"], *values["eval"]["probes"])
    for content in (values["checkpoint"], *tables):
        del content["storage_options"]
    return values


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One setting that differs between a recorded run and this one; `severity` is error, warning or note."""

    key: str
    before: Any
    now: Any
    severity: str


# severity of a change on resume: the first matching prefix decides, everything else is a note
SEVERITY = (
    ("model.dropout", "warning"), ("model.router_", "warning"), ("model.", "error"), ("train.seq_len", "error"), ("train.seed", "error"),
    ("train.global_batch", "warning"), ("train.micro_batch", "warning"), ("train.precision", "warning"),
    ("train.compile", "warning"), ("train.attention", "warning"), ("train.tf32", "warning"), ("train.float8", "warning"),
    ("optim.name", "error"), ("optim.", "warning"), ("ema.decay", "warning"), ("ema.every", "warning"),
    ("parallel.timeout_s", "note"), ("parallel.", "warning"), ("data.", "warning"), ("phase.", "warning"),
)  # fmt: skip


def compare(before: Mapping[str, Any], now: RunConfig) -> list[Change]:
    """Return what changed between the values recorded with a checkpoint and this run, in order of sections."""
    changes = []
    if before.get("model") and "head_dim" not in before["model"]:  # recorded when neighbours were turned, not halves
        changes.append(Change(key="model.rope_pairs", before="neighbours", now="halves", severity="error"))
    changes += _new_state(before, now)
    for section, content in recorded_values(now).items():
        old = before.get(section, {})
        for key, value in content.items():
            if key in old and old[key] != value:
                name = f"{section}.{key}"
                severity = next((level for prefix, level in SEVERITY if name.startswith(prefix)), "note")
                changes.append(Change(key=name, before=old[key], now=value, severity=severity))
    return changes


def _new_state(before: Mapping[str, Any], now: RunConfig) -> list[Change]:
    """Return what makes the run hold other state than a recorded one, which may not have had the setting yet."""
    changes = []
    if "optim" in before and "name" not in before["optim"] and now.optim.name != "adamw":
        changes.append(Change(key="optim.name", before="adamw", now=now.optim.name, severity="error"))
    decay = before.get("ema", {}).get("decay", 0.0)
    if before and (decay > 0) != (now.ema.decay > 0):
        changes.append(Change(key="ema.decay", before=decay, now=now.ema.decay, severity="error"))
    bias = before.get("model", {}).get("router_bias_rate", 0.0)
    if before and (bias > 0) != (now.model.router_bias_rate > 0):  # the bias is state
        rate = now.model.router_bias_rate
        changes.append(Change(key="model.router_bias_rate", before=bias, now=rate, severity="error"))
    changes += _other_groups(before.get("parallel", {}), now) if before else []
    phases = before.get("phase", {}).get("each", [])
    if phases and not now.phase.each:
        changes.append(Change(key="phase", before=f"{len(phases)} phases", now="none", severity="error"))
    if any(phase.from_tokens for phase in now.phase.each):  # the beginnings follow from the sizes of all steps before
        sizes = [(key, before["train"][key], getattr(now.train, key)) for key in ("global_batch",) if "train" in before]
        changes += [Change(key=f"train.{k}", before=b, now=n, severity="error") for k, b, n in sizes if b != n]
    return changes


def _other_groups(before: Mapping[str, Any], now: RunConfig) -> list[Change]:
    """Return what begins or ends that groups train apart, or the momentum of their outer optimizer: both are state."""
    every, momentum = before.get("sync_every", 0), before.get("outer_momentum", 0.0)
    parallel = now.parallel
    if (every > 0) != (parallel.sync_every > 0):
        return [Change(key="parallel.sync_every", before=every, now=parallel.sync_every, severity="error")]
    if every and (momentum > 0) != (parallel.outer_momentum > 0):
        now_is = parallel.outer_momentum
        return [Change(key="parallel.outer_momentum", before=momentum, now=now_is, severity="error")]
    return []


def refuse_changes(changes: Sequence[Change]) -> None:
    """Raise ConfigError if one of the changes makes the recorded state unusable."""
    bad = [change for change in changes if change.severity == "error"]
    if bad:
        raise ConfigError(
            f"this run cannot resume: {', '.join(change.key for change in bad)} changed since the checkpoint",
            found=", ".join(f"{change.key} = {change.now}" for change in bad),
            expected=", ".join(f"{change.key} = {change.before}" for change in bad),
            state="Nothing was trained; the checkpoint is untouched.",
            remedy="set the recorded value again, or start a new run with another checkpoint.root",
        )


def other_data(error: SamplerStateError) -> DataError:
    """Return what a sampler's refusal means for a run whose settings are those of its checkpoint."""
    return DataError(
        "this run cannot resume: its data is not that of the checkpoint",
        found=error.found,
        expected=error.expected,
        state="Nothing was trained; the checkpoint is untouched.",
        remedy="prepare the earlier data again, or start a new run with another checkpoint.root",
    )
