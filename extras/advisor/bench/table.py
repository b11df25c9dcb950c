"""A benchmark's document as a person reads it: the sentences about the machine, then tables. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from flashckpt.bench.layouts import DEFAULTS, PUBLISHED
from flashckpt.commands.quantity import as_setting, show_bytes, show_rate, show_s
from flashckpt.errors import ConfigError

LEAST_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One figure of two results.

    Attributes:
        name: Where it stands in the documents.
        a, b: Medians.
        ratio: b over a.
        verdict: "beyond the spread", "within the spread", or "too few rounds".
    """

    name: str
    a: float
    b: float
    ratio: float
    verdict: str


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    """Return every summarised figure that both documents hold, in the order of the first.

    A difference is beyond the spread where the medians are further apart than the interquartile ranges of both
    together: half of the runs of each lie on their own side.

    Raises:
        ConfigError: They are of different kinds, or have no figure in common.
    """
    if a.get("kind") != b.get("kind"):
        raise ConfigError("these results cannot be compared", found=f"bench {a.get('kind')} and bench {b.get('kind')}")
    others = dict(_compared(b["results"]))
    rows = [_difference(name, one, others[name]) for name, one in _compared(a["results"]) if name in others]
    if not rows:
        raise ConfigError("these results have no figure in common", found=f"two results of bench {a.get('kind')}")
    return rows


def caveats(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Return why the two may not be comparable: load, other arguments, another machine or other versions."""
    said = [
        f"{name} was measured under load: {'; '.join(doc['load']['reasons'])}"
        for name, doc in (("the first", a), ("the second", b))
        if doc.get("load", {}).get("loaded")
    ]
    for key in sorted({*a.get("arguments", {}), *b.get("arguments", {})}):
        left, right = a.get("arguments", {}).get(key), b.get("arguments", {}).get(key)
        if left != right and key not in {"url", "json", "plot"}:
            said.append(f"{key} differs: {left} and {right}")
    for key in ("cpu", "cores", "kernel", "libraries", "file_systems"):
        left, right = a.get("host", {}).get(key), b.get("host", {}).get(key)
        if left != right:
            said.append(f"{key.replace('_', ' ')} differ: {left} and {right}")
    return said


def _compared(value: Any, path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(value, list):
        value = dict(enumerate(value, 1))
    if not isinstance(value, Mapping):
        return
    if {"median", "spread", "n"} <= set(value):
        yield path, value
        return
    for key, item in value.items():
        yield from _compared(item, f"{path}.{key}" if path else str(key))


def _difference(name: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Difference:
    first, second = float(a["median"]), float(b["median"])
    apart = abs(second - first)
    room = abs(first) * float(a["spread"]) + abs(second) * float(b["spread"])
    verdict = "beyond the spread" if apart > room else "within the spread"
    if min(a["n"], b["n"]) < LEAST_ROUNDS:
        verdict = "too few rounds"
    ratio = second / first if first else float("inf")
    return Difference(name=name, a=first, b=second, ratio=ratio, verdict=verdict)


SECONDS = {
    "memcpy_s": "plain copy of the state",
    "restorable_s": "snapshot until restorable from memory",
    "restored_memory_s": "restored from memory",
    "memory_plan_s": "  of it: plan",
    "memory_read_s": "  of it: read, verify, copy",
    "memory_wall_s": "the whole call of restore()",
    "memory_inventory_s": "  of it: what all ranks hold",
    "memory_lineage_s": "  of it: claim the new generation",
    "persist_s": "slowest rank's packs and index",
    "node_commit_s": "commit",
    "node_durable_s": "slots until durable (committed)",
    "restored_storage_s": "restored from storage, cold",
    "storage_root_s": "  of it: list and manifest",
    "storage_plan_s": "  of it: plan",
    "storage_read_s": "  of it: read, verify, copy",
    "storage_wall_s": "the whole call of restore()",
    "durable_s": "durable (packs, index, commit)",
    "commit_s": "  of it: commit",
    "publish_s": "small durable publish (4 KiB)",
    "commit_small_s": "small conditional publish",
    "list_small_s": "list of them",
    "restored_s": "restored, cold",
    "list_s": "  of it: list",
    "manifest_s": "  of it: manifest",
    "restore_read_s": "  of it: read (summed over threads)",
    "restore_verify_s": "  of it: verify (summed over threads)",
    "restore_copy_s": "  of it: copy (summed over threads)",
}


_SKEWS = ("restorable_s", "restored_memory_s", "persist_s", "restored_storage_s")


def about(document: Mapping[str, Any]) -> list[str]:
    """Return what was measured on, line by line, the load first where it spoils the figures."""
    host, load = document["host"], document["load"]
    libraries = " ".join(f"{name} {version}" for name, version in host["libraries"].items())
    lines = [f"UNDER LOAD: {reason}" for reason in load["reasons"]]
    lines += [
        (
            f"{host['cores']} cores ({host['cpu']}), {show_bytes(host['memory_bytes'])}, kernel {host['kernel']},"
            f" Python {host['python']}; load {load['load_before']} before, {load['other_cores']} cores used by others"
        ),
        libraries,
    ]
    lines += [f"{one['type']} on {one['device']} ({one['options']})" for one in host["file_systems"] if one]
    return lines


def tables(document: Mapping[str, Any]) -> Iterator[Table]:
    """Yield the tables of a document, whatever its kind."""
    results = document["results"]
    yield _seconds(results)
    yield _rates(results)
    if parts := results.get("parts_ms"):
        yield _summaries("ms per part of 16 MiB, or of what a read asks for", parts)
    if peers := results.get("peers"):
        yield _peers(results, peers)


def notes(document: Mapping[str, Any]) -> list[str]:
    """Return the rest of the figures, one line each."""
    results = document["results"]
    return [*_training_notes(results), *_persist_notes(results), *_place_notes(results), *_use(document)]


def _use(document: Mapping[str, Any]) -> list[str]:
    """Return the line of a program for what was measured of a store: a tenth of the time is spent on writing at most."""
    durable = document["results"]["summary_s"].get("durable_s")
    if document["kind"] != "store" or durable is None:
        return []
    asked, time = document["arguments"], as_setting(max(10, durable["median"] * 10))
    compression = "" if asked.get("compression", "off") == "off" else f', compression="{asked["compression"]}"'
    size = show_bytes(asked["size"])
    return [f'for {size} per node: Checkpointer("{asked["url"]}", persist_every="{time}"{compression})']


def _training_notes(results: Mapping[str, Any]) -> list[str]:
    """What snapshots cost training."""
    lines = []
    if stall := results.get("stall_ms"):
        lines.append(
            f"stall per snapshot {_ms(stall['median'])} (p50), {_ms(stall['p99'])} (p99), {_ms(stall['max'])} (max): the"
            f" call {_ms(results['call_ms']['median'])}, the rest is what the steps beside the copy lose; first snapshot"
            f" {show_s(results['first']['stall_s'])}"
        )
        times = {name: one["median"] for name, one in results["x_memcpy"].items()}
        lines.append(
            f"a plain copy of the state takes {show_s(results['summary_s']['memcpy_s']['median'])}: the call is {times['call_s']:.2g} x that,"
            f" the stall {times['stall_s']:.2g} x, until restorable {times['restorable_s']:.2g} x, restored from memory"
            f" {times['restored_memory_s']:.2g} x"
        )
        lines.append(
            f"first touch of the slots {show_rate(results['first_touch_bytes_per_s'])} per rank, once, in the background"
        )
    if results.get("step_uplift") is not None:
        lines.append(f"steps {results['step_uplift']:.1%} longer while a persist runs")
    return lines


def _persist_notes(results: Mapping[str, Any]) -> list[str]:
    """What persisting and restoring cost, and how uneven the ranks were."""
    lines = [
        f"{name} costs {one['median']:.3g} CPU s/GB"
        for name in ("persist", "write", "read")
        if (one := results.get(f"{name}_cpu_s_per_gb"))
    ]
    lines += [
        f"peak extra memory of the persist {show_bytes(results[name])}"
        for name in ("persist_peak_extra_bytes", "peak_extra_bytes")
        if name in results
    ]
    if skew := results.get("slowest_over_median"):
        worst = ", ".join(f"{SECONDS[key].strip()} {value:.2f}" for key, value in skew.items() if key in _SKEWS)
        lines.append(f"slowest rank over the median one: {worst}")
    return lines


def _place_notes(results: Mapping[str, Any]) -> list[str]:
    """What is to be known of the place itself."""
    lines = []
    if "publishes_per_s" in results:
        lines.append(f"{results['publishes_per_s']:.3g} small durable publishes per second, one after another")
    if cold := results.get("cold"):
        share = cold.get("cached_share")
        left = "" if share is None else f"; {share:.0%} still cached"
        lines.append(f"cold reads: {cold['how']}{left}")
    if "backend" in results:
        tries = "retries not known" if results["retries"] is None else f"{results['retries']} retries"
        lines.append(f"backend {results['backend']}, {tries}")
    able = results.get("capabilities", {})
    lines += [f"{key}: {able['notes'].get(key, _yes(value))}" for key, value in able.items() if key != "notes"]
    lines += [f"the store said: {line}" for line in results.get("warnings", [])]
    return lines


def _yes(value: Any) -> str:
    return {True: "yes", False: "NO", None: "not tried"}[value] if value is None or isinstance(value, bool) else value


def _ms(value: float) -> str:
    return show_s(value / 1e3)


def new_table(title: str, names: Sequence[str]) -> Table:
    """Return an empty table; the first column is text, the others are figures."""
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title_justify="left")
    for number, name in enumerate(names):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    return table


def _seconds(results: Mapping[str, Any]) -> Table:
    table = new_table("seconds (of the slowest rank)", ("", "median", "min", "p95", "max", "spread", "n"))
    for key, words in SECONDS.items():
        if one := results["summary_s"].get(key):
            times = [show_s(one[part]) for part in ("median", "min", "p95", "max")]
            table.add_row(words, *times, f"{one['spread']:.0%}", str(one["n"]))
    return table


def _rates(results: Mapping[str, Any]) -> Table:
    table = new_table("rates", ("", "in all", "min", "max", "slowest rank"))
    for key, one in results["bytes_per_s"].items():
        ranks = results.get("rank_bytes_per_s", {}).get("persist" if key == "durable" else key)
        slowest = show_rate(min(ranks)) if ranks else ""
        table.add_row(key, *[show_rate(one[part]) for part in ("median", "min", "max")], slowest)
    return table


def _summaries(title: str, found: Mapping[str, Any]) -> Table:
    table = new_table(title, ("", "p50", "p95", "p99", "max", "n"))
    for key, one in found.items():
        table.add_row(key, *[f"{one[part]:.3g}" for part in ("median", "p95", "p99", "max")], str(one["n"]))
    return table


def _peers(results: Mapping[str, Any], peers: Mapping[str, Any]) -> Table:
    """Return the peers below ourselves: what the call blocks, what the steps beside it lose, when it is durable."""
    names = ("", "call blocks", "steps beside lose", "written", "durable")
    table = new_table("peers, same tensors, same rounds (slowest rank)", names)
    ours = [results["summary_s"][key] for key in ("call_s", "beside_s", "node_written_s", "node_durable_s")]
    table.add_row("flashckpt", *[show_s(one["median"]) for one in ours])
    for name, one in peers.items():
        parts = ("blocked_s", "beside_s", "written_s", "durable_s")
        table.add_row(name, *[show_s(one[key]["median"]) if key in one else "" for key in parts])
    return table


def published_table() -> Table:
    """Return the published checkpoint sizes beside ours, with the difference explained."""
    table = Table(title="checkpoint sizes", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title_justify="left")
    for name in ("layout", "ranks", "ours", "published", "why they differ"):
        table.add_column(name)
    for row in PUBLISHED:
        layout = DEFAULTS[row.layout]
        cut = f"{layout.ranks} = {layout.tp}x{layout.pp}x{layout.dp}, ZeRO {layout.zero}"
        table.add_row(row.layout, cut, show_bytes(layout.total_bytes), row.stated, row.why)
    return table
