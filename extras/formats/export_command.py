"""`flashckpt export`: a checkpoint as safetensors, a torch.save file or a folder of torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from flashckpt.checkpoint.catalog import CheckpointInfo
from flashckpt.checkpoint.retention import reading
from flashckpt.cli.common import (
    Command,
    choose,
    human_bytes,
    json_option,
    new_table,
    open_root,
    passed_over,
    root_options,
    show,
    step_option,
)
from flashckpt.commands.progress import progress
from flashckpt.commands.quantity import parse_size
from flashckpt.core.manifest import Manifest
from flashckpt.errors import ConfigError
from flashckpt.interop import safetensors_files as st
from flashckpt.interop.outgoing import Outgoing, parse_dtype, target_dtype
from flashckpt.interop.selection import Selection, parse_selection, refuse_clashes, refuse_nothing
from flashckpt.interop.target import replacing
from flashckpt.restore.sources import Meter, StorageSource
from flashckpt.storage.store import Store

FORMATS = ("safetensors", "torch", "dcp", "torch_checkpointing")
_SUFFIXES = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch"}
_OVERHEAD_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """What is exported, where to and how."""

    path: Path
    kind: str
    selection: Selection
    dtype: str | None
    limit_bytes: int
    force: bool

    def replaced(self, nbytes: int, is_ours: Callable[[Path], bool]) -> AbstractContextManager[Path]:
        """Give the temporary path to write `nbytes` of tensors to."""
        return replacing(self.path, nbytes=nbytes + _OVERHEAD_BYTES, force=self.force, is_ours=is_ours)


def wanted_of(
    *,
    to: str,
    kind: str | None,
    only: tuple[str, ...],
    strip: tuple[str, ...],
    rename: tuple[str, ...],
    dtype: str | None,
    max_shard_size: str,
    force: bool,
    **_: Any,
) -> Export:
    """Return what the options of the command ask for; ConfigError names one that cannot be used."""
    kind = kind or _SUFFIXES.get(Path(to).suffix)
    if kind is None or "://" in to:
        raise ConfigError(
            "--to cannot be written" if kind else "the format of the export is not known",
            found=to,
            expected="a path on this machine" if kind else "--format safetensors, torch or dcp",
        )
    return Export(
        path=Path(to),
        kind=kind,
        selection=parse_selection(only, strip, rename),
        dtype=parse_dtype(dtype),
        limit_bytes=parse_size(max_shard_size),
        force=force,
    )


def selection_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --only, --strip and --rename."""
    for option in (
        click.option(
            "--rename", metavar="OLD=NEW", multiple=True, help="Begin names with NEW where they begin with OLD."
        ),
        click.option("--strip", metavar="PREFIX", multiple=True, help="Take PREFIX off names."),
        click.option("--only", metavar="PATTERN", multiple=True, help="Take these names only, e.g. --only 'model.*'."),
    ):
        function = option(function)
    return function


@click.command(cls=Command)
@root_options
@step_option
@click.option("--to", "to", metavar="PATH", required=True, help="File or folder to write.")
@click.option(
    "--format", "kind", type=click.Choice(FORMATS), help="  [default: by PATH: .safetensors, or .pt, .pth, .bin]"
)
@selection_options
@click.option("--dtype", metavar="DTYPE", help="Cast floating-point tensors, e.g. bfloat16 (fp8 and integers stay).")
@click.option(
    "--max-shard-size", default="5GB", show_default=True, metavar="SIZE", help="Most bytes of one safetensors file."
)
@click.option("--force", is_flag=True, help="Replace what is at PATH.")
@json_option
def export(*, root: str, options: tuple[str, ...], step: str | None, as_json: bool, **choices: Any) -> None:
    """Write a checkpoint of ROOT in a format that others read; every byte is verified on the way.

    safetensors   tensors only. PATH.safetensors: one file; else a folder as Hugging Face's, with an index
    torch         one torch.save file, for torch.load(weights_only=True); nested as dcp names it, flat with
                  --strip or --rename
    dcp           a folder for torch.distributed.checkpoint's own reader
    torch_checkpointing  a folder for its CheckpointManager, as one rank writes it

    Examples:
      flashckpt export /checkpoints/run7 --only 'model.*' --strip model. --to weights --format safetensors
      flashckpt export s3://bucket/run7 --step 1200 --to all.pt
      flashckpt export /checkpoints/run7 --to bf16.safetensors --only 'model.*' --dtype bfloat16
    """
    wanted = wanted_of(**choices)
    store = open_root(root, options)
    info = choose(store, step)
    skipped = passed_over(store, info) if step is None else []
    with progress("exporting", info.nbytes, quiet=as_json) as advance:
        document = export_checkpoint(store, info, wanted, advance) | {"passed_over": skipped}
    for problem in skipped:
        click.echo(f"a newer checkpoint cannot be used and was passed over: {problem}", err=True)
    show(document, as_json=as_json, table=lambda: _table(document))


def export_checkpoint(
    store: Store, info: CheckpointInfo, wanted: Export, advance: Callable[[int], None] = lambda _: None
) -> dict[str, Any]:
    """Write a checkpoint of a root; return what was done.

    A lease keeps retention away meanwhile; `advance` is called with the bytes that were read, from several threads.
    """
    with reading(store, info.prefix) as manifest:
        source = StorageSource(store, manifest, info.prefix)
        source.meter = _ReportingMeter(advance)
        done = (_safetensors if wanted.kind == "safetensors" else _torch)(wanted, source)
    return {
        "root": store.url,
        "step": info.step,
        "generation": info.generation,
        "to": str(wanted.path.absolute()),
        "format": wanted.kind,
        **done,
    }


class _ReportingMeter(Meter):
    """Reports what was read."""

    def __init__(self, advance: Callable[[int], None]) -> None:
        super().__init__()
        self._advance = advance

    def add(self, nbytes: int, read_s: float, verify_s: float, requests: int = 1) -> None:
        """Count one read."""
        super().add(nbytes, read_s, verify_s, requests)
        self._advance(nbytes)


def _outgoing(manifest: Manifest, held: str, name: str, dtype: str | None) -> Outgoing:
    table = manifest.table
    shard = table.shard(table.rows(held)[0])
    return Outgoing(
        name=name,
        held=held,
        stored=shard.dtype,
        dtype=target_dtype(shard.dtype, dtype),
        shape=shard.global_shape,
    )


def _safetensors(wanted: Export, source: StorageSource) -> dict[str, Any]:
    manifest, selection = source.manifest, wanted.selection
    names = [name for name in manifest.table.fqns if selection.takes(name)]
    refuse_nothing(len(names), selection, manifest.table.fqns)
    pairs = [(name, selection.rename(name)) for name in names]
    refuse_clashes(pairs)
    tensors = [_outgoing(manifest, held, name, wanted.dtype) for held, name in pairs]
    st.refuse_dtypes(tensors)
    nbytes = sum(one.nbytes for one in tensors)
    metadata = {"flashckpt.step": str(manifest.step), "flashckpt.generation": str(manifest.generation)}
    with wanted.replaced(nbytes, st.is_ours) as temporary:
        if wanted.path.suffix == st.SUFFIX:
            st.write_files({temporary: tensors}, source, metadata)
            files = [wanted.path.name]
        else:
            files = st.write_folder(temporary, tensors, source, metadata, limit=wanted.limit_bytes)
    left = sorted(
        key for key in manifest.values if key.partition("@")[0] != "dcp" and key[0] != "." and selection.takes(key)
    )
    return {"tensors": len(tensors), "values": 0, "nbytes": nbytes, "files": files, "left_out": left}


def _torch(wanted: Export, source: StorageSource) -> dict[str, Any]:
    from flashckpt.dcp.contents import contents_of
    from flashckpt.dcp.reader import whole_tensor
    from flashckpt.interop import dcp_folders, torch_checkpointing_folders, torch_files
    from flashckpt.state import pytree

    manifest, selection = source.manifest, wanted.selection
    held = contents_of(manifest, is_typed=True)
    pairs = [(key, selection.rename(key)) for key in held.paths if selection.takes(key, held.tensors.get(key, key))]
    refuse_clashes(pairs)
    tensors = {
        new: _outgoing(manifest, held.tensors[key], new, wanted.dtype) for key, new in pairs if key in held.tensors
    }
    refuse_nothing(len(pairs), selection, manifest.table.fqns)
    values = {
        new: pytree.unflatten(held.values[key], lambda name: whole_tensor(source, name))
        for key, new in pairs
        if key in held.values
    }
    paths = {new: (new,) if selection.renames else held.paths[key] for key, new in pairs}
    nbytes = sum(one.nbytes for one in tensors.values())
    write, is_ours = {
        "torch": (torch_files.write_torch_file, _is_dcp),
        "dcp": (dcp_folders.write_dcp_folder, _is_dcp),
        "torch_checkpointing": (torch_checkpointing_folders.write_folder, torch_checkpointing_folders.is_ours),
    }[wanted.kind]
    with wanted.replaced(nbytes, is_ours) as temporary:
        write(temporary, tensors, values, paths, source)
    kept = {*held.tensors.values(), *(name for one in held.values.values() for name in pytree.tensor_names(one))}
    left = sorted(name for name in manifest.table.fqns if name not in kept and selection.takes(name))
    return {
        "tensors": len(tensors),
        "values": len(values),
        "nbytes": nbytes,
        "files": [wanted.path.name],
        "left_out": left,
    }


def _is_dcp(path: Path) -> bool:
    return path.is_file() and (path.name.endswith(".distcp") or path.name == ".metadata")


def _table(document: dict[str, Any]) -> Table:
    table = new_table("STEP", "FORMAT", ">TENSORS", ">VALUES", ">SIZE", "FILES", "LEFT OUT")
    files, left = document["files"], document["left_out"]
    table.add_row(
        f"{document['step']}.g{document['generation']}",
        document["format"],
        str(document["tensors"]),
        str(document["values"]),
        human_bytes(document["nbytes"]),
        f"{document['to']} ({len(files)} files)" if len(files) > 1 else document["to"],
        ", ".join(left[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else ""),
    )
    return table
