"""Summaries and tables of `stall.py`: the slowest rank of every round, ratios to the memcpy of the same run first."""

from __future__ import annotations

from typing import Any

from flashckpt.bench.measure import plain, summarise


def summarised(about: list[dict[str, Any]], found: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of one group by method, and what they were taken on."""
    rounds = [one for many in found["series"].values() for one in many]
    memcpy = summarise([worst(one, "memcpy_s") for one in rounds])
    nbytes = sum(one["nbytes"] for one in about)
    result: dict[str, Any] = {
        "nbytes": nbytes,
        "tensors_per_rank": about[0]["tensors"],
        "memcpy_s": memcpy,
        "memcpy_cpu_s": summarise([rank["memcpy_cpu_s"] for one in rounds for rank in one]),
        "methods": {},
    }
    for method, many in found["series"].items():
        figures: dict[str, Any] = {}
        for key in many[0][0]:
            values = [value for one in many if (value := worst(one, key)) is not None]
            figures[key] = summarise(values) if values else None
        own = figures["memcpy_s"].median
        figures["x_memcpy"] = {
            key: summarise([worst(one, key) / worst(one, "memcpy_s") for one in many])
            for key in ("blocked_s", "lost_s", "restorable_s")
        } | {"of_medians": {key: figures[key].median / own for key in ("blocked_s", "lost_s", "restorable_s")}}
        figures["extra_cpu_s"] = summarise([sum(rank["extra_cpu_s"] for rank in one) for one in many])
        figures["first"] = {key: worst(found["first"][method], key) for key in many[0][0]}
        figures["setup_s"] = found["setup_s"][method]
        figures["memory"] = found["memory"][method]
        result["methods"][method] = figures
    if found["alone"]:
        last = found["alone"][-1]
        result["flashckpt_copy_and_digest_cpu_s"] = max(one["copy_cpu_s"] for one in last)
        result["flashckpt_skipped"] = sum(one["skipped"] for one in last)
        keys = [key for key in last[0] if key.endswith("_x")]
        result["flashckpt_alone"] = {key: summarise([worst(one, key) for one in found["alone"]]) for key in keys}
    done: dict[str, Any] = plain(result)
    return done


def worst(ranks: list[dict[str, Any]], key: str) -> Any:
    """Return the largest value over the ranks; None where none has one."""
    values = [rank[key] for rank in ranks if rank[key] is not None]
    return max(values) if values else None


def table(title: str, found: dict[str, Any]) -> str:
    """Return one configuration as a Markdown table."""
    lines = [f"\n### {title}", ""]
    for number, group in enumerate(found["groups"]):
        memcpy = group["memcpy_s"]
        about = f"{group['nbytes'] / 1e9:.2f} GB, {group['tensors_per_rank']} tensors per rank; memcpy {memcpy['median'] * 1e3:.0f} ms"
        about += f" [{memcpy['min'] * 1e3:.0f}-{memcpy['max'] * 1e3:.0f}] = {group['nbytes'] / 1e9 / memcpy['median']:.1f} GB/s"
        if "flashckpt_copy_and_digest_cpu_s" in group:
            share = group["flashckpt_copy_and_digest_cpu_s"] / group["memcpy_cpu_s"]["median"]
            about += f"; flashckpt: {group['slots']} slots, CPU of copy and digests {share:.2f} x memcpy"
            alone = {key: one["median"] for key, one in group["flashckpt_alone"].items()}
            about += f"; with nothing beside: copied and hashed {alone['copied_x']:.2f} x, COMPLETE {alone['complete_x']:.2f} x, "
            about += f"restored, verified, by one thread {alone['restored_1_thread_x']:.2f} x, by as many as it chooses {alone['restored_x']:.2f} x"
        lines.append(f"group {number + 1} of {len(found['groups'])}: {about}" if len(found["groups"]) > 1 else about)
    lines += ["", *_HEAD]
    for group in found["groups"]:
        lines += [_row(method, figures, group["nbytes"]) for method, figures in group["methods"].items()]
    lines += [f"left out: {method} ({why})" for method, why in found["left_out"].items()]
    return "\n".join(lines)


_HEAD = (
    (
        "| method (rounds) | blocked x memcpy | lost x memcpy | restorable x memcpy | step beside the copy | steps beside the write "
        "| call ms p50 / p99 / max | fence ms p50 / p99 / max | first: blocked ms | CPU s/GB | memory x state: kept + peak |"
    ),
    "|---|---|---|---|---|---|---|---|---|---|---|",
)


def _row(method: str, m: dict[str, Any], nbytes: int) -> str:
    ratio = m["x_memcpy"]
    parts = [f"{ratio['blocked_s']['median']:.3f}"]
    parts += [
        f"{ratio[key]['median']:.2f} [{ratio[key]['min']:.2f}-{ratio[key]['max']:.2f}]"
        for key in ("lost_s", "restorable_s")
    ]
    parts += [_percent(m["copying_uplift"]), _percent(m["persisting_uplift"])]
    parts += [" / ".join(f"{m[key][p] * 1e3:.2f}" for p in ("median", "p99", "max")) for key in ("call_s", "fence_s")]
    memory = m["memory"]
    parts += [
        f"{m['first']['blocked_s'] * 1e3:.1f}",
        f"{m['extra_cpu_s']['median'] / nbytes * 1e9:.2f}",
        f"{memory['standing_bytes'] / nbytes:.2f} + {memory['peak_bytes'] / nbytes:.2f}",
    ]
    return f"| {method} ({m['call_s']['n']}) | " + " | ".join(parts) + " |"


def _percent(summary: dict[str, Any] | None) -> str:
    if summary is None:
        return "-"
    return f"{summary['median'] * 100:+.0f} % [{summary['min'] * 100:+.0f} to {summary['max'] * 100:+.0f}]"
