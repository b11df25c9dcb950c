"""`flashckpt import` of files that are malformed on purpose or by chance: one error that names them, no memory, no code."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from support.fuzz_targets import STATE_DICT
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from unit.interop.test_interop import Captured, run

from flashckpt.checkpoint.catalog import list_checkpoints
from flashckpt.storage.factory import open_store

dcp: Any = torch.distributed.checkpoint
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, of its own formats


def refused(path: Path, capsys: Captured, *options: object) -> dict[str, Any]:
    """Import `path`, which must fail with one error of ours; return it."""
    root = path.parent / "root"
    code, document = run("import", path, root, "--step", 1, *options, capsys=capsys)
    assert code in (10, 16, 32), document
    assert path.name in document["error"]["problem"] + document["error"]["found"]
    assert not root.exists() or list_checkpoints(open_store(root), damaged=True) == []
    error: dict[str, Any] = document["error"]
    return error


@pytest.mark.parametrize("elements", [1 << 32, 1 << 42, 1 << 60])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_tensor_that_is_expanded_far_beyond_its_file_is_refused(
    tmp_path: Path, capsys: Captured, elements: int, zipped: bool
) -> None:
    tensor = torch.ones(1).expand(elements)
    torch.save({"w": tensor}, tmp_path / "w.pt", _use_new_zipfile_serialization=zipped)
    error = refused(tmp_path / "w.pt", capsys)
    assert error["type"] == "UnsupportedStateError"
    assert "is expanded" in error["problem"]
    assert f"{4 * elements} bytes of tensor, 4 bytes stored" in error["found"]


def test_a_small_expanded_tensor_is_imported_as_what_it_stands_for(tmp_path: Path, capsys: Captured) -> None:
    torch.save({"mask": torch.ones(1).expand(1000, 1000)}, tmp_path / "w.pt")
    code, document = run("import", tmp_path / "w.pt", tmp_path / "root", "--step", 1, capsys=capsys)
    assert (code, document["nbytes"]) == (0, 4_000_000)


def test_an_empty_file_is_said_to_be_empty(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "w.pt").touch()
    error = refused(tmp_path / "w.pt", capsys, "--format", "torch")
    assert error["type"] == "DamagedError"
    assert error["problem"].endswith("is empty")


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def bomb(levels: int) -> Any:
    value: Any = [1]
    for _ in range(levels):
        value = [value, value]
    return value


def ring() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize("make", [lambda: nested(200), lambda: nested(400), lambda: bomb(60), ring])
def test_nesting_without_bounds_is_refused(tmp_path: Path, capsys: Captured, make: Callable[[], Any]) -> None:
    torch.save({"w": torch.zeros(2), "x": make()}, tmp_path / "w.pt")
    error = refused(tmp_path / "w.pt", capsys)
    assert "deep" in error["found"] or "more leaves than bytes" in error["found"]


@pytest.mark.parametrize("what", ["sparse", "meta", "quantized"])
def test_tensors_without_bytes_in_row_major_order_are_refused(tmp_path: Path, capsys: Captured, what: str) -> None:
    tensor = {
        "sparse": lambda: torch.eye(3).to_sparse(),
        "meta": lambda: torch.empty(1 << 40, device="meta"),
        "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    }[what]()
    torch.save({"t": tensor}, tmp_path / "w.pt")
    assert "'t'" in refused(tmp_path / "w.pt", capsys)["problem"]


def pickled_zip(path: Path, data: bytes) -> None:
    """A file of torch.save whose pickle is `data`."""
    file = io.BytesIO()
    torch.save({}, file)
    with zipfile.ZipFile(file) as archive, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as out:
        for entry in archive.infolist():
            out.writestr(entry.filename, data if entry.filename.endswith("data.pkl") else archive.read(entry))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b".",
        b"\x80\x02" + b"(" * 100_000 + b".",
        b"\x80\x02cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R.",  # 2 GB of zeroes
        b"\x80\x02cbuiltins\nbytearray\n\x8a\x06\0\0\0\0\0\x10\x85R.",  # 16 TB
        b"\x80\x02Nr\xff\xff\xff\x7f.",  # a memo of 16 GB
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"\x80\x02cos\nsystem\nX\x04\0\0\0true\x85R.",
    ],
)
@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_pickles_that_ask_for_memory_or_code_get_neither(
    tmp_path: Path, capsys: Captured, data: bytes, kind: str
) -> None:
    if kind == "torch":
        path = tmp_path / "w.pt"
        pickled_zip(path, data)
    else:
        dcp.save({"w": torch.zeros(2)}, checkpoint_id=tmp_path / "d")
        path = tmp_path / "d"
        (path / ".metadata").write_bytes(data)
    refused(path, capsys)
    peak_kib = next(
        int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")
    )
    assert peak_kib < 8 << 20


def header_only(path: Path, text: bytes, data: bytes = b"") -> None:
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]},
        {"dtype": "F32", "shape": [1e400], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [0, 1 << 70], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [1] * 300, "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]},
        {"dtype": "F32", "shape": None, "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0, "4"]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]},
        {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F33", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [6, 10]},
        7, None, [], "x",
    ],
)  # fmt: skip
def test_a_safetensors_entry_that_cannot_be_is_refused(tmp_path: Path, capsys: Captured, entry: Any) -> None:
    header = {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "x": entry}
    header_only(tmp_path / "w.safetensors", json.dumps(header).encode(), bytes(8))
    refused(tmp_path / "w.safetensors", capsys)


@pytest.mark.parametrize(
    "text", [b"[" * 100_000, b'{"a":' * 50_000, b"[]", b'{"\\ud800": {"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b"\xff\xfe"]
)  # fmt: skip
def test_a_safetensors_header_that_is_nested_or_no_object_is_refused(
    tmp_path: Path, capsys: Captured, text: bytes
) -> None:
    header_only(tmp_path / "w.safetensors", text, bytes(4))
    refused(tmp_path / "w.safetensors", capsys)


@pytest.mark.parametrize(
    "index",
    [b"", b"[" * 100_000, b"7", b'{"weight_map": 7}', b'{"weight_map": {"w": 7}}', b'{"weight_map": {"w": "../x"}}',
     b'{"weight_map": {"w": ".."}}', b'{"weight_map": {"w": "a\\u0000b"}}', json.dumps({"weight_map": {"w": "x" * 300}}).encode()],
)  # fmt: skip
def test_an_index_of_a_folder_that_cannot_be_is_refused(tmp_path: Path, capsys: Captured, index: bytes) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model.safetensors.index.json").write_bytes(index)
    refused(tmp_path / "hf", capsys, "--format", "safetensors")


def changed_metadata(folder: Path, change: Callable[[Metadata], None]) -> None:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def widen(metadata: Metadata) -> None:
    for kind in metadata.state_dict_metadata.values():
        if isinstance(kind, TensorStorageMetadata):
            kind.size = torch.Size([1 << 40])
            kind.chunks[0].sizes = torch.Size([1 << 40])


def leave(metadata: Metadata) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = "../d/__0_0.distcp"


def misplace(metadata: Metadata) -> None:
    for info in metadata.storage_data.values():
        info.offset = -5


def retype(metadata: Metadata) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = 7


def unlist(metadata: Metadata) -> None:
    metadata.state_dict_metadata = 7  # type: ignore[assignment]  # that is the damage


def rename(metadata: Metadata) -> None:
    metadata.planner_data = {"w": 7}


@pytest.mark.parametrize("change", [widen, leave, misplace, retype, unlist, rename])
def test_dcp_metadata_that_cannot_be_is_refused(
    tmp_path: Path, capsys: Captured, change: Callable[[Metadata], None]
) -> None:
    dcp.save({"w": torch.zeros(2)}, checkpoint_id=tmp_path / "d")
    changed_metadata(tmp_path / "d", change)
    refused(tmp_path / "d", capsys)


def test_a_cut_of_any_length_is_an_error_or_whole(tmp_path: Path, capsys: Captured) -> None:
    torch.save(STATE_DICT, tmp_path / "w.pt")
    raw = (tmp_path / "w.pt").read_bytes()
    for end in range(0, len(raw), 97):
        (tmp_path / "w.pt").write_bytes(raw[:end])
        refused(tmp_path / "w.pt", capsys)


def test_a_path_that_cannot_be_read_is_named(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "folder.pt").mkdir()
    refused(tmp_path / "folder.pt", capsys, "--format", "torch")
    refused(tmp_path / "nothing", capsys, "--format", "dcp")
