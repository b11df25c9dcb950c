"""Files that are not what their kind says: each is read right, or refused with its name and the place, never read wrong."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.megatron import write_megatron

from flashckpt.errors import ConfigError, DataError
from flashckpt.sampler import JsonLines, MegatronFile, TextLines, TokenFile
from flashckpt.trainer.config import from_values, read_config
from flashckpt.trainer.config.eval import ProbeConfig
from flashckpt.trainer.data.mixed import MixedDataset, channels_of
from flashckpt.trainer.data.prepared import check_sources
from flashckpt.trainer.data.token_windows import Shards
from flashckpt.trainer.prepare import vocabulary
from flashckpt.trainer.prepare.command import data as data_command
from flashckpt.trainer.prepare.corpus import _file_texts, is_held_out
from flashckpt.trainer.prepare.documents import documents_of, parts_of
from flashckpt.trainer.prepare.shards import prepare
from flashckpt.trainer.prepare.vocabulary import Vocabulary, train_bpe
from flashckpt.trainer.scored.questions import read_questions

WORDS = [f"Gr\u00fc\u00dfe {number} aus K\u00f6ln, caf\u00e9 \u00e0 la carte" for number in range(60)]
LINES = [json.dumps({"text": one, "prompt": one, "target": "x"}, ensure_ascii=False) for one in WORDS]


def archives(data: bytes) -> dict[str, bytes]:
    """Return data in every wrapping that this machine can make, and the beginnings of some that it cannot."""
    tar, packed = io.BytesIO(), io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as file:
        entry = tarfile.TarInfo("a.txt")
        entry.size = len(data)
        file.addfile(entry, io.BytesIO(data))
    with zipfile.ZipFile(packed, "w") as zipped:
        zipped.writestr("a.txt", data)
    npy = io.BytesIO()
    np.save(npy, np.frombuffer(data, np.uint8))
    return {
        "gzip": gzip.compress(data), "bzip2": bz2.compress(data), "bzip2 of nothing": bz2.compress(b""), "xz": lzma.compress(data),
        "zip": packed.getvalue(), "tar": tar.getvalue(), "tar.gz": gzip.compress(tar.getvalue()),
        "zstd": b"\x28\xb5\x2f\xfd" + data, "PDF": b"%PDF-1.7\n" + data, "Parquet": b"PAR1" + data + b"PAR1",
        "Arrow": b"ARROW1\0\0" + data, "HDF5": b"\x89HDF\r\n\x1a\n" + data, "SQLite": b"SQLite format 3\0" + data,
        "Megatron": b"MMIDIDX\0\0" + data, "safetensors": struct.pack("<Q", 80) + b'{"a": {"dtype": "F32"}}' + data,
    }  # fmt: skip


def encodings(text: str) -> dict[str, bytes]:
    whole = text.encode()
    names = ("utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "latin-1", "cp1252", "mac-roman")
    return {
        "utf-8": whole, **{name: text.encode(name) for name in names}, "cut": whole[: whole.index("\u00df".encode()) + 1],
        "damaged": whole[:1000] + b"\xff" + whole[1000:], "surrogates": text.replace("\u00fc", "\ud83d").encode("utf-8", "surrogatepass"),
    }  # fmt: skip


def outcome(read: Callable[[], Any], path: Path) -> Any:
    """Return what is read of a file, or the error, which names the file."""
    try:
        return read()
    except DataError as error:
        found = error
    assert str(path) in str(found)
    return found


def read_text(path: Path) -> list[str]:
    (source,) = from_values({"data": {"sources": [{"kind": "text", "urls": [str(path)]}]}}).data.sources
    return [text for part in parts_of(source) for text in documents_of(part)]


def read_jsonl(path: Path) -> list[str]:
    (source,) = from_values({"data": {"sources": [{"kind": "jsonl", "urls": [str(path)]}]}}).data.sources
    return [text for part in parts_of(source, split_bytes=700) for text in documents_of(part)]


def read_probe(path: Path) -> list[str]:
    return [one.prompt for one in read_questions(ProbeConfig(name="p", url=str(path), kind="probability"))]


def rows(data: TextLines) -> list[str]:
    return [data[number] for number in range(len(data))]


WHOLE = "\n".join(WORDS)
DOORS: dict[str, tuple[Callable[[Path], list[str]], str, list[str]]] = {
    "text": (read_text, WHOLE, [WHOLE]),
    "data.source": (lambda path: [text for _, text in _file_texts([str(path)])], WHOLE, [WHOLE]),
    "TextLines": (lambda path: rows(TextLines(path)), WHOLE, WORDS),
    "jsonl": (read_jsonl, "\n".join(LINES), WORDS),
    "JsonLines": (lambda path: rows(JsonLines(path, key="text")), "\n".join(LINES), WORDS),
    "probe": (read_probe, "\n".join(LINES), WORDS),
}


@pytest.mark.parametrize("door", DOORS)
def test_text_is_read_right_or_refused_by_name_at_every_door(door: str, tmp_path: Path) -> None:
    read, text, right = DOORS[door]
    contents = {**encodings(text), **archives(text.encode())}
    refused = {}
    for name, data in contents.items():
        path = tmp_path / f"{name}.txt"
        path.write_bytes(data)
        found = outcome(lambda path=path: read(path), path)  # type: ignore[misc]
        if isinstance(found, DataError):
            refused[name] = str(found)
        else:
            assert found == right, name
    assert set(contents) - set(refused) == {"utf-8", "utf-8-sig"}
    for name in ("gzip", "bzip2", "xz", "zip", "tar", "zstd", "PDF", "Parquet", "Arrow", "safetensors"):
        assert name.lower() in refused[name].lower(), refused[name]
    for name in ("utf-16", "utf-16-le", "utf-32"):
        assert name.upper()[:6] in refused[name] or "UTF-16" in refused[name]
    assert "byte" in refused["latin-1"]


TOKENS = np.arange(1000, 3000)


def headed(magic: int, dtype: str, *, count: int = len(TOKENS)) -> bytes:
    header = np.zeros(256, "<i4")
    header[:3] = magic, 1, count
    return header.tobytes() + TOKENS.astype(dtype).tobytes()


def saved(values: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


def token_contents() -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Return files of tokens that say what they are, and files that cannot be read as tokens of 2 bytes."""
    right = {f"npy {kind}": saved(TOKENS.astype(kind)) for kind in ("<u2", ">u2", "<i4", "<u4", "<i8", "<u8")}
    right |= {"llm.c": headed(20240520, "<u2"), "llm.c 3": headed(20240801, "<u4"), "newer": headed(20251013, "<u4")}
    right["plain"] = TOKENS.astype("<u2").tobytes()
    wrong = {f"wide {kind}": TOKENS.astype(kind).tobytes() for kind in ("<u4", "<i4", "<i8")}
    wrong |= {
        "npy 2d": saved(TOKENS.reshape(2, -1)),
        "npy float": saved(TOKENS.astype("f4")),
        "npy texts": saved(np.array(["a"])),
    }
    wrong |= {f"{name} cut": data[:-2] for name, data in right.items() if name != "plain"}
    wrong |= {f"{name} longer": data + b"\0\0\0\0" for name, data in right.items() if name != "plain"}
    wrong |= {
        "llm.c count": headed(20240520, "<u2", count=1999),
        "odd": right["plain"][:-1],
        "npy header": saved(TOKENS)[:40],
    }
    wrong |= {"text": WHOLE.encode(), "latin-1": WHOLE.encode("latin-1"), "jsonl": "\n".join(LINES).encode()}
    wrong |= {"chinese": ("\u4f60\u597d\uff0c\u4e16\u754c\u3002" * 300).encode(), **archives(WHOLE.encode())}
    return right, {name: data for name, data in wrong.items() if name != "Megatron"} | {
        "Megatron": b"MMIDIDX\0\0" + bytes(900)
    }


def test_files_of_tokens_are_read_by_their_header_or_refused_by_name(tmp_path: Path) -> None:
    right, wrong = token_contents()
    for name, data in {**right, **wrong}.items():
        path = tmp_path / f"{name}.bin"
        path.write_bytes(data)
        file = outcome(lambda path=path: TokenFile(path, window=100), path)  # type: ignore[misc]
        if isinstance(file, DataError):
            assert name in wrong, file
        else:
            assert name in right, f"{name} is read as {file[0][:9]}"
            found = np.concatenate([file[number][:100] for number in range(len(file))])
            assert np.array_equal(found, TOKENS[: len(found)]), name


@pytest.mark.parametrize(
    ("dtype", "tokens"),
    [
        ("uint8", np.frombuffer(WHOLE.encode(), np.uint8)),
        ("uint16", np.tile([0, 1, 2, 3], 500)),
        ("uint16", np.tile([7, 3000], 500)),
        ("uint16", np.zeros(2000, int)),
        ("uint32", np.tile([100_000, 20], 500)),
        ("int32", np.random.default_rng(1).integers(0, 50_000, 5000)),
        ("uint16", np.random.default_rng(2).zipf(1.3, 20_000) % 50_257),
    ],
)
def test_tokens_of_any_alphabet_are_not_taken_for_something_else(dtype: Any, tokens: Any, tmp_path: Path) -> None:
    tokens.astype(dtype).tofile(tmp_path / "a.bin")
    assert np.array_equal(TokenFile(tmp_path / "a.bin", window=10, dtype=dtype)[1], tokens[10:21])


@pytest.mark.parametrize(("kind", "bad"), [("uint16", 300), ("int32", -5), ("int64", 1 << 40)])
@pytest.mark.parametrize("place", [3, -3])
def test_tokens_outside_the_vocabulary_are_known_at_the_start(kind: str, bad: int, place: int, tmp_path: Path) -> None:
    tokens = np.arange(200)
    tokens[place] = bad
    tokens.astype(kind).tofile(tmp_path / "a.bin")
    source = {"kind": "tokens", "urls": [str(tmp_path / "a.bin")], "dtype": kind}
    config = from_values({"train": {"seq_len": 9}, "data": {"sources": [source]}})
    with pytest.raises(ConfigError, match=rf"token {bad} in .*a.bin"):
        check_sources(config)
    windows = MixedDataset(config, "train")
    with pytest.raises(ConfigError, match=f"token {bad} in samples"):
        windows.batch(range(len(windows.samples)))


@pytest.mark.parametrize("kind", ["parquet", "datasets"])
def test_columns_that_hold_no_text_are_refused_with_the_row(kind: str, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    bad = pa.array([b"good", b"caf\xe9"], pa.binary())
    invalid = pa.StringArray.from_buffers(2, *bad.buffers()[1:])
    columns = {
        "good": pa.array(["a", "b"]), "dictionary": pa.array(["a", "b"]).dictionary_encode(), "large": pa.array(["a", "b"], pa.large_string()),
        "null": pa.array(["a", None]), "number": pa.array([1, 2]), "bytes": bad, "latin-1": invalid, "list": pa.array([["a"], ["b"]]),
    }  # fmt: skip
    read = []
    for name, column in columns.items():
        folder = tmp_path / name
        folder.mkdir()
        table = pa.table({"text": column, "other": pa.array([1, 2])})
        path = folder / "a.parquet"
        if kind == "parquet":
            pq.write_table(table, path)
        else:
            with pa.OSFile(str(folder / "a.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
                writer.write_table(table)
            (folder / "state.json").write_text('{"_data_files": [{"filename": "a.arrow"}]}')
            path = folder
        (source,) = from_values({"data": {"sources": [{"kind": kind, "urls": [str(path)]}]}}).data.sources
        found = outcome(lambda source=source: [t for p in parts_of(source) for t in documents_of(p)], folder)  # type: ignore[misc]
        if not isinstance(found, DataError):
            read.append((name, found))
    assert read == [(name, ["a", "b"]) for name in ("good", "dictionary", "large")]


def test_what_a_tokenizer_raises_names_the_file_and_the_line(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "tokenizer.json").write_bytes(train_bpe(["the quick brown fox " * 20], 270))
    lines = ['{"text": "good"}', '{"text": "cut \\ud83d"}', '{"text": "POISON"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    source = {"kind": "jsonl", "urls": [str(tmp_path / "a.jsonl")]}
    values = {"folder": str(tmp_path / "t"), "tokenizer": str(tmp_path / "tokenizer.json"), "sources": [source]}
    data = from_values({"data": {**values, "holdout_every": 1000}}).data
    index = prepare(data)
    (record,) = index["sources"][0]
    assert record["train"]["documents"] == 3
    assert Vocabulary((tmp_path / "tokenizer.json").read_bytes()).encode(["cut \ud83d"])[0].tolist()[-2] != 0

    plain = vocabulary.valid_text

    def poisoned(text: str) -> Any:
        return None if "POISON" in text else plain(text)

    monkeypatch.setattr(vocabulary, "valid_text", poisoned)  # None: what the library raises TypeError for
    with pytest.raises(
        DataError, match=rf"the line at byte {len(lines[0] + lines[1]) + 2} of .*a.jsonl cannot be tokenised"
    ):
        prepare(from_values({"data": {**values, "holdout_every": 999}}).data)


def test_shards_whose_index_is_of_other_tokens_are_refused(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / f"{name}.txt").write_text(f"{name} " * 50)
        source = {"kind": "text", "urls": [str(tmp_path / f"{name}.txt")]}
        data = from_values({"data": {"folder": str(tmp_path / name), "holdout_every": 1000, "sources": [source]}}).data
        index = prepare(data)
    (mine,) = (tmp_path / "other").glob("*.train.idx")
    (foreign,) = (tmp_path / "one").glob("*.train.idx")
    Shards(data.folder, index["sources"][0], "train", index["dtype"])
    mine.write_bytes(foreign.read_bytes())
    with pytest.raises(DataError, match="does not fit its data"):
        Shards(data.folder, index["sources"][0], "train", index["dtype"])


def test_a_channel_of_which_nothing_is_held_out_is_named_with_its_numbers(tmp_path: Path, capsys: Any) -> None:
    sources, text = [], "a line of words\n" * 9
    documents = [f"{number} {text}" for number in range(60)]
    for channel, wanted in (
        ("few", [one for one in documents if not is_held_out(one.encode(), 20)][:4]),
        ("many", documents),
    ):
        (tmp_path / channel).mkdir()
        for number, document in enumerate(wanted):
            (tmp_path / channel / f"{number}.txt").write_text(document)
        sources.append(f'[[data.sources]]\nurls = ["{tmp_path}/{channel}/*.txt"]\nchannel = "{channel}"\n')
    path = tmp_path / "run.toml"
    for used, refused in ((sources, False), (sources[:1], True)):
        folder = f'[train]\nseq_len = 8\n[eval]\nevery = 5\n[data]\nfolder = "{tmp_path}/tokens{refused}"\n'
        path.write_text(folder + "".join(used))
        assert data_command(["prepare", "--config", str(path)]) == 0
        said = capsys.readouterr().err
        assert (
            "warning: channel few: 0 of 4 documents, 0 tokens are held out (about one document in data.holdout_every = 20)"
            in said
        )
        assert "channel many" not in said
        config = read_config(path)
        if refused:
            with pytest.raises(DataError, match="0 of 4 documents"):
                check_sources(config)
        else:
            check_sources(config)
            assert [name for name in channels_of(config) if name not in MixedDataset(config, "held").channels] == [
                "few"
            ]


def test_parts_of_a_megatron_data_set_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    documents = [np.arange(number, number + 5 + number % 3) for number in range(100, 112)]
    whole = np.concatenate(documents)
    write_megatron(tmp_path / "m", documents, 8, "<u2")
    index, data = (tmp_path / "m.idx").read_bytes(), (tmp_path / "m.bin").read_bytes()
    count = len(documents)
    wrong: dict[str, tuple[bytes, bytes]] = {
        f"version {number}": (index[:9] + struct.pack("<Q", number) + index[17:], data) for number in (0, 2, 1 << 40)
    }
    wrong |= {f"type {code}": (index[:17] + bytes([code]) + index[18:], data) for code in (0, 1, 2, 4, 5, 6, 7, 9, 255)}
    for at, name in ((18, "sequences"), (26, "documents")):
        for number in (0, 1, count - 1, count + 2, 1 << 60):
            wrong[f"{name} {number}"] = (index[:at] + struct.pack("<Q", number) + index[at + 8 :], data)
    for at in (34, 38, 34 + 4 * count, 42 + 4 * count, 34 + 12 * count, len(index) - 8):  # lengths, pointers, documents
        wrong[f"changed at {at}"] = (index[:at] + struct.pack("<i", 77) + index[at + 4 :], data)
    for cut in (1, 2, 7, len(data) // 2, len(data)):
        wrong[f"bin without {cut}"] = (index, data[:-cut])
        wrong[f"bin and {cut}"] = (index, data + bytes(cut))
        wrong[f"idx without {cut}"] = (index[:-cut], data)
    for name, (idx, content) in {"right": (index, data), **wrong}.items():
        (tmp_path / "m.idx").write_bytes(idx)
        (tmp_path / "m.bin").write_bytes(content)
        found = outcome(lambda: MegatronFile(tmp_path / "m"), tmp_path / "m")
        assert isinstance(found, DataError) == (name != "right"), name
        if name == "right":
            assert np.array_equal(np.concatenate([found[number] for number in range(len(found))]), whole)
