"""Where weights come from: a Hugging Face folder or a checkpoint root, asked for boxes of our tensors. Torch-free."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from flashckpt.checkpoint.retention import reading
from flashckpt.cli.common import choose
from flashckpt.core.shard import ITEMSIZE, Shard
from flashckpt.errors import ConfigError, DamagedError, ShardGapError
from flashckpt.interop import safetensors_files as st
from flashckpt.restore.executor import Target, execute_reads
from flashckpt.restore.sources import Source, StorageSource
from flashckpt.storage.factory import open_in_rank
from flashckpt.trainer.config import RunConfig, from_values
from flashckpt.trainer.config.model import ModelConfig
from flashckpt.trainer.hub.families import HubTensor, router_biases, tensors_of
from flashckpt.trainer.hub.hub_config import from_hub
from flashckpt.trainer.hub.root_files import kept

Bytes = npt.NDArray[np.uint8]
CONFIG = "config.json"
BESIDE = (
    CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja",
)  # fmt: skip
"""Files of a folder that travel with its weights."""
MODEL, AVERAGE = "model", "ema"
FLOATS = ("float64", "float32", "bfloat16", "float16")
"""Under which names the trainer tracks its parts, and the average of their weights."""
RECORD = "run"
"""Under which name the trainer tracks its configuration."""
_ROW_BYTES = 64 << 10
"""Below this the columns of a row are read along with the rest of it."""


class WeightSource(Protocol):
    """Weights of a model under our names.

    Attributes:
        model: What they are weights of.
        beside: Files that travel with them, by name: config.json and the tokenizer's.
    """

    model: ModelConfig
    where: str
    beside: Mapping[str, bytes]

    def dtype(self, name: str) -> str:
        """Return the type of the elements of a tensor."""
        ...

    def read(self, name: str, offsets: Sequence[int], lengths: Sequence[int]) -> Bytes:
        """Return the bytes of a box of a tensor, row-major; errors name the file or the object."""
        ...

    def close(self) -> None:
        """Give up the lease on a checkpoint."""
        ...


class HubFolder:
    """A folder as `from_pretrained` reads it; see WeightSource.

    Raises:
        ConfigError: No config.json, an unknown family, a tensor is missing or has another shape.
        DamagedError: A file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self.model = from_hub(read_json(folder / CONFIG), str(folder / CONFIG))
        self.beside: Mapping[str, bytes] = {
            name: (folder / name).read_bytes() for name in BESIDE if (folder / name).is_file()
        }
        there = {name: one for one in st.read_folder(folder, is_judged=True) for name in (one.name, *one.also)}
        self.parts: dict[str, list[tuple[HubTensor, st.Incoming]]] = {}
        for tensor in tensors_of(self.model):
            found = there.get(tensor.theirs)
            if found is None or found.shape != tensor.shape:
                raise ConfigError(
                    f"{folder} does not hold the model that its {CONFIG} describes",
                    found=f"{tensor.theirs} of shape {found.shape}" if found else f"no {tensor.theirs}",
                    expected=f"{tensor.theirs} of shape {tensor.shape}",
                    state="Nothing was read.",
                )
            parts = self.parts.setdefault(tensor.ours, [])
            parts.append((tensor, found))
            wanted = FLOATS if len(parts) == 1 else (parts[0][1].dtype,)  # parts of one tensor are read as one type
            if found.dtype not in wanted:
                raise ConfigError(
                    f"{folder} holds weights of a type that is no model's",
                    found=f"{tensor.theirs} of {found.dtype}",
                    expected=", ".join(wanted),
                    state="Nothing was read.",
                    remedy="save them in a floating-point type, all experts in the same one",
                )
        self._refuse_others(there)

    def _refuse_others(self, there: Mapping[str, st.Incoming]) -> None:
        """Raise ConfigError for a tensor that the model has no place for: it would compute something else without it."""
        taken = {tensor.theirs: file for parts in self.parts.values() for tensor, file in parts}
        embedding, head = taken["model.embed_tokens.weight"], there.get("lm_head.weight")
        others = sorted(name for name in there.keys() - taken if not name.endswith("rotary_emb.inv_freq"))
        if self.model.tied_embeddings and head is not None and _are_equal(head, embedding):
            others.remove("lm_head.weight")
        if others:
            raise ConfigError(
                f"{self.where} holds tensors that the model of its {CONFIG} does not have",
                found=", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else ""),
                expected="lm_head.weight equal to the embedding: tie_word_embeddings is true"
                if others == ["lm_head.weight"]
                else "no others than those of a model of ours; biases and further heads it has not",
                state="Nothing was read.",
            )

    def dtype(self, name: str) -> str:
        """See WeightSource."""
        return self.parts[name][0][1].dtype

    def read(self, name: str, offsets: Sequence[int], lengths: Sequence[int]) -> Bytes:
        """See WeightSource."""
        parts = self.parts[name]
        if parts[0][0].expert is None:
            return _read_box(parts[0][1], offsets, lengths)
        chosen = parts[offsets[0] : offsets[0] + lengths[0]]
        return np.concatenate([_read_box(file, offsets[1:], lengths[1:]) for _, file in chosen])

    def close(self) -> None:
        """See WeightSource."""


def _are_equal(one: st.Incoming, other: st.Incoming) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    nbytes, block = one.shard(one.name).nbytes, 16 << 20
    places = ((at, min(at + block, nbytes)) for at in range(0, nbytes, block))
    return one == other or all(one.read(*place) == other.read(*place) for place in places)


def _read_box(file: st.Incoming, offsets: Sequence[int], lengths: Sequence[int]) -> Bytes:
    """Read whole rows where that costs little, else the wanted columns of each."""
    size = ITEMSIZE[file.dtype]
    if len(file.shape) == 1:
        start = offsets[0] * size
        return np.frombuffer(file.read(start, start + lengths[0] * size), np.uint8)
    (first, left), (rows, columns), width = offsets, lengths, file.shape[1]
    if columns < width and columns * size >= _ROW_BYTES:
        starts = [((first + row) * width + left) * size for row in range(rows)]
        return np.concatenate([np.frombuffer(file.read(at, at + columns * size), np.uint8) for at in starts])
    whole = np.frombuffer(file.read(first * width * size, (first + rows) * width * size), np.uint8)
    return np.ascontiguousarray(whole.reshape(rows, width * size)[:, left * size : (left + columns) * size]).reshape(-1)


class SavedWeights:
    """The model in what the trainer saved, wherever its bytes are; see WeightSource.

    Attributes:
        may_be_part: Whether the sources may be those of one node of several.
        run: The recorded run, as far as it matters for the model.
        recorded: All that was recorded of it, section by section.
        cwd: The folder that it ran in; "" where it did not record that.

    Raises:
        ConfigError: It is not of the trainer.
    """

    may_be_part = False

    def __init__(self, sources: Sequence[Source], values: Mapping[str, Any], where: str, label: str = MODEL) -> None:
        self.where, self._sources, self.label = where, list(sources), label
        self.run, self.recorded = _recorded(values, where)
        self.cwd = str(values[RECORD].get("cwd", ""))
        self.model = self.run.model
        biases = router_biases(self.model)
        self.shapes = {tensor.ours: tensor.whole for tensor in tensors_of(self.model)} | biases
        self._beside_average = frozenset(biases)
        for name, shape in self.shapes.items():
            held_as = self._held_as(name)
            found = self._first(held_as)
            if (
                found is None
                and label == AVERAGE
                and not any(self._first(held_name(one, label)) for one in self.shapes)
            ):
                raise ConfigError(
                    f"{where} holds no average of the weights",
                    found=f"no {held_as}",
                    expected="a checkpoint of a run with ema.decay above 0",
                )
            if found is None and self.may_be_part:
                raise self._part(f"without {held_as}")
            if found is None or found.global_shape != shape:
                raise ConfigError(
                    f"{where} does not hold the model that was recorded with it",
                    found=f"{held_as} of shape {found.global_shape}" if found else f"no {held_as}",
                    expected=f"{held_as} of shape {shape}",
                )
        self.beside: Mapping[str, bytes] = {
            name: self._file(name, held.global_shape[0]) for name in BESIDE if (held := self._first(_FILE + name))
        }

    def _held_as(self, name: str) -> str:
        """Return what a tensor is called in the sources; biases of routers have no average."""
        return held_name(name, MODEL if name in self._beside_average else self.label)

    def _part(self, missing: str) -> ShardGapError:
        """Return the error of a node that does not hold the whole model."""
        first = self._sources[0].manifest
        ranks = ", ".join(str(rank) for source in self._sources for rank in source.manifest.writers)
        return ShardGapError(
            f"this node holds only a part of the model: {self.where}",
            found=f"ranks {ranks} of {first.world_size}, {missing}",
            expected="every element of the model in the memory of one node",
            state="The job was not disturbed.",
            remedy="give its checkpoint root instead: there the newest checkpoint is whole",
        )

    def kept(self) -> Mapping[str, bytes]:
        """Return the files that the run left beside its checkpoints."""
        return {}

    @property
    def init_from(self) -> str:
        """Where the weights of the run came from; "" if it drew them."""
        init = self.recorded.get("init")
        return str(init.get("from", "")) if isinstance(init, dict) else ""

    def dtype(self, name: str) -> str:
        """See WeightSource."""
        held = self._first(self._held_as(name))
        assert held is not None, "all tensors of the model were there"
        return held.dtype

    def read(self, name: str, offsets: Sequence[int], lengths: Sequence[int]) -> Bytes:
        """See WeightSource."""
        shard = Shard(
            fqn=self._held_as(name),
            dtype=self.dtype(name),
            global_shape=self.shapes[name],
            offsets=tuple(offsets),
            lengths=tuple(lengths),
        )
        return self._read(shard)

    def _read(self, shard: Shard) -> Bytes:
        raw = np.empty(shard.nbytes, np.uint8)
        execute_reads([Target(shard=shard, buffer=raw.data)], self._sources, threads=1)
        return raw

    def _first(self, held: str) -> Shard | None:
        """Return a part of a tensor; None where nobody holds one."""
        for table in (source.manifest.table for source in self._sources):
            if len(rows := table.rows(held)):
                return table.shard(rows[0])
        return None

    def _file(self, name: str, nbytes: int) -> bytes:
        return self._read(file_shard(name, nbytes)).tobytes()

    def close(self) -> None:
        """See WeightSource."""
        for source in self._sources:
            source.close()


class CheckpointWeights(SavedWeights):
    """The model of a checkpoint that the trainer wrote, or `hub import`; see WeightSource.

    Args:
        root: Path or URL.
        step: "120" or "120.g3"; None: the newest.
        label: MODEL or AVERAGE.

    Raises:
        NoCheckpointError: There is none.
        ConfigError: It is not of the trainer, or has no average.
    """

    def __init__(
        self, root: str, step: str | None = None, options: Mapping[str, Any] | None = None, label: str = MODEL
    ) -> None:
        store = open_in_rank(root, options or {})
        info = choose(store, step)
        with ExitStack() as held:
            manifest = held.enter_context(reading(store, info.prefix))
            self.source, self._store = StorageSource(store, manifest, info.prefix), store
            super().__init__([self.source], manifest.values, f"{store.url}/{info.prefix}", label)
            self._held = held.pop_all()

    def kept(self) -> Mapping[str, bytes]:
        """See SavedWeights."""
        return kept(self._store)

    def close(self) -> None:
        """See WeightSource."""
        super().close()
        self._held.close()


_FILE = "hub/"


def held_name(name: str, label: str = MODEL) -> str:
    """Return what a tensor is called in a checkpoint."""
    return f"{label}.{name}"


def file_shard(name: str, nbytes: int) -> Shard:
    """Return the row under which a file lies in a checkpoint."""
    return Shard(fqn=_FILE + name, dtype="uint8", global_shape=(nbytes,), offsets=(0,), lengths=(nbytes,))


def _recorded(values: Mapping[str, Any], where: str) -> tuple[RunConfig, dict[str, Any]]:
    """Return the run that wrote a checkpoint as far as it matters here, and all that it recorded of itself."""
    record = values.get(RECORD)
    config = record.get("config") if isinstance(record, dict) else None
    if not isinstance(config, dict) or not isinstance(config.get("model"), dict) or "head_dim" not in config["model"]:
        raise ConfigError(
            f"{where} is no checkpoint of this trainer",
            found="no configuration of a model in it"
            if not isinstance(config, dict)
            else "a model of an older release",
            expected="a checkpoint written by `python -m flashckpt.trainer` or by its `hub import`",
        )
    known = {field.name for field in dataclasses.fields(ModelConfig)}
    sections = {"model": {key: value for key, value in config["model"].items() if key in known}}
    if isinstance(config.get("train"), dict) and "seq_len" in config["train"]:
        sections["train"] = {"seq_len": config["train"]["seq_len"]}
    for section, own in values[RECORD].get("phase", {}).items():  # as it was in the phase that wrote it
        sections.setdefault(section, {}).update(own)
    return from_values(sections), dict(config)


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object; ConfigError where it is not there, DamagedError where it is none."""
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read",
            found=error.strerror or str(error),
            expected="a folder as `save_pretrained` writes it: config.json and *.safetensors",
        ) from error
    except ValueError as error:
        raise DamagedError(f"{path} is not JSON", found=str(error)[:100]) from error
    if not isinstance(values, dict):
        raise DamagedError(f"{path} is not a JSON object", found=type(values).__name__)
    return values


def is_hub_folder(where: str) -> bool:
    """Return whether a path is a folder with a config.json; any other is taken for a checkpoint root."""
    return "://" not in where and (Path(where) / CONFIG).is_file()


def open_weights(where: str, options: Mapping[str, Any] | None = None, label: str = MODEL) -> WeightSource:
    """Return the weights of a Hugging Face folder, or of the newest checkpoint of a root (`label`: or their average)."""
    return HubFolder(Path(where)) if is_hub_folder(where) else CheckpointWeights(where, options=options, label=label)
