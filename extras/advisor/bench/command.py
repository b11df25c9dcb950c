"""`flashckpt bench`: store, shm, job and compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from flashckpt.bench.layouts import DEFAULTS, scaled
from flashckpt.cli.common import console, json_file_option, parse_options
from flashckpt.cli.output import OutputConsole
from flashckpt.commands.quantity import DURATION, SCALE, SIZE, show_bytes
from flashckpt.core.snapshot_id import MAX_SLOTS, MIN_SLOTS
from flashckpt.errors import ConfigError
from flashckpt.printable import to_json

MOST_ROUNDS = 1000
_F = TypeVar("_F", bound=Callable[..., Any])


def common(command: _F) -> _F:
    """Add the options that every measuring command has."""
    for option in reversed(
        (
            click.option("--rounds", type=int, default=5, help="Measured rounds; medians and spread are over them."),
            json_file_option,
            click.option("--plot", "plot_path", type=click.Path(path_type=Path), help="Picture of the distributions."),
            click.option("--require-quiet", is_flag=True, help="Refuse above one runnable thread per core."),
        )
    ):
        command = option(command)
    return command


def on_storage(command: _F) -> _F:
    """Add the options of commands that write to storage."""
    for option in reversed(
        (
            click.option("-o", "options", metavar="KEY=VALUE", multiple=True, help="Storage option, repeatable."),
            click.option("--compression", default="off", help="off, zstd, zstd:LEVEL or auto."),
            click.option("--keep", is_flag=True, help="Keep what the last round wrote."),
            click.option("--drop-caches", is_flag=True, help="Drop all caches of this machine before reads (root)."),
        )
    ):
        command = option(command)
    return command


@click.group("bench")
def bench() -> None:
    """Measure memory and storage the way flashckpt uses them.

    Everything is written below one folder that is removed afterwards, also after Ctrl-C, and on the next run after
    a kill. Results go to `flashckpt plan --from`.
    """


@bench.command("store", context_settings={"show_default": True})
@click.argument("url")
@click.option("--size", type=SIZE, default="1GB", help="Bytes per object.")
@click.option("--small", type=int, default=20, help="Small publishes per round.")
@on_storage
@common
def store_command(url: str, **options: Any) -> None:
    """Durable writes, cold reads, small publishes, commits and their tail at URL."""
    from flashckpt.bench import scratch
    from flashckpt.bench.store import StoreRun, need_bytes, run_store

    _check(options, small=(1, 100_000))
    _size(options["size"], 1 << 20)
    run = StoreRun(
        size_bytes=options["size"],
        rounds=options["rounds"],
        small=options["small"],
        compression=_compression(options["compression"]),
        drop_caches=options["drop_caches"],
        keep=options["keep"],
    )
    _refuse_memory(3 * run.size_bytes)
    given = parse_options(options["options"])
    with _measuring("store", {"url": _plain(url), **_said(options)}, options) as finish:
        with (
            scratch.storage(url, need_bytes(run), options=given, keep=options["keep"]) as place,
            _progress() as report,
        ):
            results, paths = run_store(run, place, report), [place.directory] if place.directory else []
        finish(results, paths)


@bench.command("shm", context_settings={"show_default": True})
@click.option("--size", type=SIZE, default="256MiB", help="Bytes of state per rank.")
@click.option("--ranks", type=int, default=1, help="Processes at once.")
@click.option("--slots", type=int, default=2, help="Snapshots per rank in memory.")
@common
def shm_command(**options: Any) -> None:
    """First touch, snapshot and restore in host memory, per rank and for N ranks together."""
    from flashckpt.bench.job import JobRun

    _check(options, ranks=(1, 256), slots=(MIN_SLOTS, MAX_SLOTS))
    _size(options["size"], 1 << 20)
    table = {"uniform_bytes": options["size"], "ranks": options["ranks"]}
    run = JobRun(table=table, ranks=options["ranks"], rounds=options["rounds"], slots=options["slots"])
    _run_job("shm", run, None, options)


@bench.command("job", context_settings={"show_default": True})
@click.argument("url", required=False)
@click.option(
    "--layout", "name", type=click.Choice(sorted(DEFAULTS)), default="llama3-8b", help="Model and layout to measure."
)
@click.option("--scale", type=SCALE, default="1/64", help="Share of the model's bytes, for example 1/64.")
@click.option("--ranks", type=int, help="First ranks of the layout that take part; all if not given.")
@click.option("--tp", type=int, help="Tensor-parallel ranks instead of the layout's.")
@click.option("--pp", type=int, help="Pipeline stages instead of the layout's.")
@click.option("--dp", type=int, help="Data-parallel ranks instead of the layout's.")
@click.option("--zero", type=click.Choice(["0", "1", "3"]), help="ZeRO stage instead of the layout's.")
@click.option("--slots", type=int, default=2, help="Snapshots per rank in memory.")
@click.option("--peers", is_flag=True, help="Also torch.save, dcp.save, dcp.async_save and safetensors.")
@click.option("--sizes", is_flag=True, help="Only print the layouts' sizes beside the published ones.")
@click.option("--like", type=click.Choice(["mlperf"]), help="Storage alone, by the published rules of that benchmark.")
@click.option("--gpus", type=int, default=1024, help="With --like: of the job that the answer is for.")
@click.option("--step-time", type=DURATION, default="1s", help="With --like: seconds per step of that job.")
@on_storage
@common
def job_command(url: str | None, **options: Any) -> None:
    """Snapshot, persist, commit and restore at a real model's shard layout, with real processes, at URL."""
    from flashckpt.bench import PEERS
    from flashckpt.bench.job import JobRun, table_of

    if options["sizes"]:
        from flashckpt.bench.table import published_table

        console().print(published_table())
        return
    if url is None:
        raise ConfigError("bench job needs a URL to persist to", remedy="flashckpt bench job --layout llama3-8b URL")
    _check(options, tp=(1, 1024), pp=(1, 1024), dp=(1, 65536), ranks=(1, 256), slots=(MIN_SLOTS, MAX_SLOTS))
    changes: dict[str, Any] = {key: int(options[key]) for key in ("tp", "pp", "dp", "zero") if options[key] is not None}
    layout = scaled(replace(DEFAULTS[options["name"]], **changes), options["scale"])
    ranks = layout.ranks if options["ranks"] is None else options["ranks"]
    if options["like"]:
        _like(url, layout, ranks, options)
        return
    run = JobRun(
        table=table_of(layout, ranks),
        ranks=ranks,
        rounds=options["rounds"],
        slots=options["slots"],
        peers=PEERS if options["peers"] else (),
        compression=_compression(options["compression"]),
        drop_caches=options["drop_caches"],
        keep=options["keep"],
    )
    _run_job("job", run, url, options)


def _like(url: str, layout: Any, ranks: int, options: dict[str, Any]) -> None:
    """Run the storage alone by published rules, and show what it means for a job."""
    from flashckpt.bench import scratch
    from flashckpt.bench.job import table_of
    from flashckpt.bench.mlperf import CHECKPOINTS
    from flashckpt.bench.mlperf_run import LikeRun, run_like, sentences

    table_of(layout, ranks)  # refuses a number of ranks that the layout, or a machine, has not
    given = click.get_current_context().get_parameter_source("rounds") is not ParameterSource.DEFAULT
    run = LikeRun(
        layout=layout,
        name=options["name"],
        ranks=ranks,
        gpus=options["gpus"],
        step_s=options["step_time"],
        checkpoints=options["rounds"] if given else CHECKPOINTS,
        drop_caches=options["drop_caches"],
    )
    _refuse_memory(ranks * run.process_bytes)
    stored = parse_options(options["options"])
    said = {"url": _plain(url), **_said(options), "ranks": ranks, "rounds": run.checkpoints}
    with (
        _measuring("mlperf-like", said, options, lambda made: sentences(made["results"], _plain(url))) as finish,
        scratch.memory(1 << 20, what="bench job") as memory,
        scratch.storage(url, run.storage_bytes, options=stored, keep=options["keep"], processes=2) as place,
    ):
        with _progress() as report:
            results = run_like(run, memory, place, report)
        finish(results, [place.directory] if place.directory else [])


@bench.command("compare")
@click.argument("first", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path))
@json_file_option
def compare_command(first: Path, second: Path, json_path: Path | None) -> None:
    """Ratios of two results (second over first), and which differences exceed the spread."""
    from dataclasses import asdict

    from flashckpt.bench.measure import plain, read_json, write_json
    from flashckpt.bench.table import caveats, compare, new_table

    a, b = read_json(first), read_json(second)
    rows, said = compare(a, b), caveats(a, b)
    made = {"schema": 1, "kind": "compare", "caveats": said, "results": [asdict(row) for row in rows]}
    if json_path is not None and str(json_path) == "-":
        click.echo(to_json(plain(made), indent=1))
        return
    if json_path is not None:
        write_json(json_path, made)
    out = console()
    for line in said:
        out.print(f"warning: {line}", markup=False)
    table = new_table(f"{second.name} over {first.name}", ("", first.name, second.name, "ratio", ""))
    for row in rows:
        table.add_row(row.name, f"{row.a:.4g}", f"{row.b:.4g}", f"{row.ratio:.3f}", row.verdict)
    out.print(table)


def _run_job(kind: str, run: Any, url: str | None, options: Mapping[str, Any]) -> None:
    """Refuse what does not fit, run, and show; shared by `shm` and `job`."""
    from contextlib import nullcontext

    from flashckpt.bench import scratch
    from flashckpt.bench.job import need_of, run_job

    need = need_of(run)
    _refuse_memory(need.private_bytes)
    if run.peers and url is not None and "://" in url and not url.startswith("file:"):
        raise ConfigError("--peers needs a local directory", found=url, expected="a directory")
    given = parse_options(tuple(options.get("options", ())))
    said = {"url": _plain(url) if url else None, **_said(options), "ranks": run.ranks, "table": dict(run.table)}
    with _measuring(kind, said, options) as finish:
        storage = (
            nullcontext()
            if url is None
            else scratch.storage(url, need.storage_bytes, options=given, keep=options["keep"], processes=2)
        )
        with (
            scratch.memory(need.shared_bytes, what=f"bench {kind}") as memory,
            storage as place,
            _progress() as report,
        ):
            results = run_job(run, memory, place, report)
            paths = [memory, *([place.directory] if place and place.directory else [])]
        finish(results, paths)


@contextmanager
def _measuring(
    kind: str,
    arguments: Mapping[str, Any],
    options: Mapping[str, Any],
    lines: Callable[[Mapping[str, Any]], Sequence[str]] | None = None,
) -> Iterator[Callable[[Mapping[str, Any], Sequence[Path]], None]]:
    """Watch the load around the body; the function it yields makes the document, shows it (as `lines`) and writes it."""
    from flashckpt.bench.measure import LoadWatch, document, require_quiet

    _refuse_results(options["json_path"], options["plot_path"])
    load = LoadWatch()
    if options["require_quiet"]:
        require_quiet(load)
    yield lambda results, paths: _finish(document(kind, arguments, results, load=load, paths=paths), options, lines)


def _refuse_results(json_path: Path | None, plot_path: Path | None) -> None:
    """Raise ConfigError where the results could not be written; better now than after the run."""
    from flashckpt.bench.plot import figure, refuse_picture_without

    if plot_path is not None:
        refuse_picture_without(plot_path)
        figure("")
    if json_path is not None and not json_path.absolute().parent.is_dir():
        raise ConfigError(f"{json_path} cannot be written", expected="a folder that exists")


def _finish(
    made: Mapping[str, Any],
    options: Mapping[str, Any],
    lines: Callable[[Mapping[str, Any]], Sequence[str]] | None = None,
) -> None:
    """Show a document, and write it and its picture where that was asked for."""
    from flashckpt.bench.measure import plain, write_json
    from flashckpt.bench.plot import draw_bench
    from flashckpt.bench.table import about, notes, tables

    if str(options["json_path"]) == "-":
        click.echo(to_json(plain(made), indent=1))
    else:
        if options["json_path"] is not None:
            write_json(options["json_path"], made)
        out = console()
        for line in about(made):
            out.print(line, markup=False)
        for table in tables(made) if lines is None else ():
            out.print(table)
        for line in (lines or notes)(made):
            out.print(line, markup=False)
    if options["plot_path"] is not None:
        draw_bench(made, options["plot_path"])


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int | None], None]]:
    """Show the current phase, bytes, rate and time left, on a terminal's standard error."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=OutputConsole(stderr=True), transient=True) as progress:
        task = progress.add_task("starting", total=None)
        yield lambda what, done, total: progress.update(task, description=what, completed=done, total=total)


def _check(options: Mapping[str, Any], **limits: tuple[int, int]) -> None:
    for name, (low, high) in {"rounds": (1, MOST_ROUNDS), **limits}.items():
        value = options[name]
        if value is not None and not low <= value <= high:
            raise ConfigError(f"--{name} is out of range", found=f"{value:,}", expected=f"{low:,} to {high:,}")


def _size(value: int, least: int) -> None:
    if not least <= value <= 1 << 44:
        raise ConfigError("--size is out of range", found=show_bytes(value), expected=f"{show_bytes(least)} to 16 TiB")


def _refuse_memory(need_bytes: int) -> None:
    """Raise ConfigError if memory would not suffice; an OOM kill may hit another process."""
    from flashckpt.bench.host import available_bytes

    if need_bytes > (free := available_bytes()):
        raise ConfigError(
            "this run does not fit into memory",
            found=f"{show_bytes(free)} available",
            expected=f"{show_bytes(need_bytes)} for live state and restored state",
            state="Nothing was written.",
            remedy="a smaller --scale or --size, or fewer --ranks",
        )


def _compression(text: str) -> str:
    if text != "auto":
        from flashckpt.checkpoint.compression import parse_compression

        parse_compression(text)
    return text


def _plain(url: str) -> str:
    """Return the URL without credentials: it goes into the result."""
    scheme, mark, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}" if mark else url


def _said(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that the result repeats: no paths of results, no secrets."""
    left_out = {"json_path", "plot_path", "require_quiet", "options", "keep"}
    return {key: value for key, value in options.items() if key not in left_out and value is not None}
