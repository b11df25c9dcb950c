"""The workloads: each library's data set with the numbers 0 to 47 in it, and the loader that a user makes of it.

What a loader cannot do is a promise too: `promised` says for which of the trials it is refused.
"""

from __future__ import annotations

import importlib.util
import sys
import unittest.mock
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

SAMPLES, GLOBAL_BATCH, EPOCHS = 48, 4, 2
KILLS, WORKERS, RANKS = "kills", "workers", "ranks"
TRIALS = {KILLS: "killed", WORKERS: "other workers", RANKS: "other ranks"}
EXACT, REFUSED = "exact", "refused"


class Place(NamedTuple):
    """Where a rank is, and with how many workers."""

    data: Path
    rank: int
    ranks: int
    workers: int

    @property
    def batch(self) -> int:
        return GLOBAL_BATCH // self.ranks


Made = tuple[Any, dict[str, Any]]
"""What the loop iterates over, and what is tracked."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A loader of a library.

    Attributes:
        name: In the table.
        make: Returns the loader.
        needs: Modules without which it is skipped.
        workers: Numbers of workers of the starts of the trial of that name.
        promised: Trial -> what must come out; EXACT where it is not named.
        note: What a reader must know.
    """

    name: str
    make: Callable[[Place], Made]
    needs: tuple[str, ...] = ()
    workers: tuple[int, ...] = (0, 2, 1)
    promised: Mapping[str, str]
    note: str = ""

    def missing(self) -> list[str]:
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


class Numbers(Dataset):  # type: ignore[type-arg]
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return {"id": index}


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Without state, in the same order each time; shared by the workers of a loader as libraries do."""

    def __init__(self, place):
        self.place = place

    def __iter__(self):
        worker = get_worker_info()
        first, each = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for index in range(self.place.rank + first * self.place.ranks, SAMPLES, self.place.ranks * each):
            yield {"id": index}


def ids_of(batch):
    """Return the samples of a batch of any of the libraries."""
    found = batch["id"] if isinstance(batch, Mapping) else [one["id"] for one in batch]
    return [int(one) for one in (found.tolist() if hasattr(found, "tolist") else found)]


def exact(source, **options) -> Made:
    from flashckpt.integrations.loaders import ExactLoader

    data = ExactLoader(source, **options)
    return data, {"data": data}


def itself(source) -> Made:
    """Return a loader that is tracked without an ExactLoader."""
    return source, {"data": source}


def bare(make: Callable[[Place], Made]) -> Callable[[Place], Made]:
    """Return what makes the loader of a workload, to be tracked by itself."""

    def made(place):
        with unittest.mock.patch(f"{__name__}.exact", itself):
            return make(place)

    return made


def elastic(dataset, place, **options) -> Made:
    from flashckpt.sampler import ElasticSampler

    sampler = ElasticSampler(
        dataset, dp_rank=place.rank, dp_size=place.ranks, global_batch_size=GLOBAL_BATCH, seed=1, fingerprint="numbers"
    )
    loader = DataLoader(dataset, batch_size=place.batch, sampler=sampler, num_workers=place.workers, **options)
    return loader, {"data": sampler}


def indexed(place):
    return elastic(Numbers(), place)


def grain_map(place):
    import grain

    return elastic(grain.MapDataset.source(range(SAMPLES)).map(lambda index: {"id": index}), place)


def wids(place):
    import wids

    shards = [{"url": str(path), "nsamples": SAMPLES // 4} for path in tars(place)]
    return elastic(
        wids.ShardListDataset(shards, cache_dir=str(place.data / "wids"), keep=True), place, collate_fn=_of_wids
    )


def _of_wids(samples):
    return {"id": [int(one["__key__"]) for one in samples]}


def grain_data(place):
    import grain

    data = grain.MapDataset.source(range(SAMPLES)).map(lambda index: {"id": index}).shuffle(seed=3)
    return data[place.rank :: place.ranks].batch(place.batch)


def grain_iterator(place):
    import grain

    data = grain_data(place).to_iter_dataset()
    return exact(data.mp_prefetch(grain.MultiprocessingOptions(num_workers=place.workers)) if place.workers else data)


def grain_window(place):
    import grain

    data = grain.MapDataset.source(range(SAMPLES))[place.rank :: place.ranks].map(lambda index: {"id": index})
    data = grain.experimental.WindowShuffleIterDataset(data.to_iter_dataset(), window_size=7, seed=3)
    data = data.batch(place.batch)
    if place.workers:
        return exact(data.mp_prefetch(grain.MultiprocessingOptions(num_workers=place.workers)))
    return exact(grain.experimental.ThreadPrefetchIterDataset(data, prefetch_buffer_size=3))


def grain_loader(place):
    import grain

    shards = grain.sharding.ShardOptions(shard_index=place.rank, shard_count=place.ranks)
    order = grain.samplers.IndexSampler(num_records=SAMPLES, shard_options=shards, shuffle=True, num_epochs=1, seed=3)
    operations = [_Named(), grain.transforms.Batch(batch_size=place.batch)]
    return exact(
        grain.DataLoader(
            data_source=list(range(SAMPLES)), sampler=order, operations=operations, worker_count=place.workers
        )
    )


def _Named():
    import grain

    class Named(grain.transforms.Map):  # type: ignore[misc]  # Grain is not there when types are checked
        def map(self, element):
            return {"id": element}

    return Named()


def torchdata_map(place):
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    order = StatefulDistributedSampler(Numbers(), num_replicas=place.ranks, rank=place.rank, seed=3)
    return exact(StatefulDataLoader(Numbers(), batch_size=place.batch, sampler=order, num_workers=place.workers))


def torchdata_nodes(place):
    from torchdata.nodes import Batcher, Loader, ParallelMapper, Prefetcher, SamplerWrapper
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    order = StatefulDistributedSampler(Numbers(), num_replicas=place.ranks, rank=place.rank, seed=3)
    node = ParallelMapper(SamplerWrapper(order), Numbers().__getitem__, place.workers, method="thread")
    return exact(Loader(Prefetcher(Batcher(node, place.batch), 3)))


def without_torchvision():
    """Let mosaicml's package import its data sets of images: nothing of them is used, and torchvision's wheels need CUDA's torch."""
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision"):
        return
    for name in ("transformers.feature_extraction_utils", "transformers.tokenization_utils_base"):
        importlib.import_module(name)  # they look for it
    for name in ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional"):
        sys.modules[name] = unittest.mock.MagicMock(__spec__=ModuleSpec(name, None))
    sys.modules["torchvision.datasets"].VisionDataset = type("VisionDataset", (), {})  # type: ignore[attr-defined]


def mosaic(place):
    without_torchvision()
    from streaming import StreamingDataLoader, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    data = StreamingDataset(
        local=str(place.data / "mosaic"), shuffle=True, shuffle_seed=3, batch_size=place.batch, num_canonical_nodes=1
    )
    return exact(StreamingDataLoader(data, batch_size=place.batch, num_workers=place.workers))


def litdata(place):
    from litdata import StreamingDataLoader, StreamingDataset

    data = StreamingDataset(str(place.data / "litdata"), shuffle=True, seed=3, drop_last=True)
    return exact(StreamingDataLoader(data, batch_size=place.batch, num_workers=place.workers))


def _stream(place):
    import datasets
    from datasets.distributed import split_dataset_by_node

    rows = datasets.Dataset.from_list([{"id": index} for index in range(SAMPLES)])
    return split_dataset_by_node(rows.to_iterable_dataset(num_shards=4), rank=place.rank, world_size=place.ranks)


def hf_stream(place):
    stream = _stream(place).batch(place.batch)
    return exact(_in_workers(stream, place) if place.workers else stream)


def _in_workers(stream, place):
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(stream, batch_size=None, num_workers=place.workers)


def _buffered(place):
    return _stream(place).shuffle(seed=3, buffer_size=16).batch(place.batch)


def hf_buffer(place):
    stream = _buffered(place)
    return exact(
        DataLoader(stream, batch_size=None, num_workers=place.workers) if place.workers else stream, replay=True
    )


def hf_buffer_bare(place):
    return itself(_in_workers(_buffered(place), place) if place.workers else _buffered(place))


def grain_bare(place):
    import grain

    data = grain_data(place).repeat(EPOCHS).to_iter_dataset()
    if place.workers:
        data = data.mp_prefetch(grain.MultiprocessingOptions(num_workers=place.workers))
    return itself(iter(data))


def tars(place):
    return sorted((place.data / "tars").glob("*.tar"))


def webdataset(place):
    import webdataset

    data = webdataset.WebDataset(
        [str(path) for path in tars(place)], shardshuffle=False, nodesplitter=webdataset.split_by_node
    )
    data = data.map(lambda one: {"id": int(one["__key__"])}).batched(place.batch, collation_fn=list)
    return exact(webdataset.WebLoader(data, batch_size=None, num_workers=place.workers), replay=True)


def plain(place):
    return exact(DataLoader(Stream(place), batch_size=place.batch, num_workers=place.workers), replay=True)


def plain_bare(place):
    return exact(DataLoader(Stream(place), batch_size=place.batch))


def torchdata_bare(place):
    from torchdata.stateful_dataloader import StatefulDataLoader

    return itself(StatefulDataLoader(Stream(place), batch_size=place.batch, num_workers=place.workers))


_OTHER_RANKS_REFUSED = {RANKS: REFUSED}
_ALL_REFUSED = dict.fromkeys(TRIALS, REFUSED)
_ALIKE = {WORKERS: REFUSED, RANKS: REFUSED}
_EVERYWHERE: dict[str, str] = {}

WORKLOADS = {
    one.name: one
    for one in (
        Workload(name="torch `Dataset`, `ElasticSampler`", make=indexed, promised=_EVERYWHERE),
        Workload(name="Grain `MapDataset`, `ElasticSampler`", make=grain_map, needs=("grain",), promised=_EVERYWHERE),
        Workload(name="WebDataset `wids`, `ElasticSampler`", make=wids, needs=("wids",), promised=_EVERYWHERE),
        Workload(name="Grain `IterDataset`, shuffled", make=grain_iterator, needs=("grain",), promised=_ALIKE),
        Workload(
            name="Grain stream, window shuffle, prefetch",
            make=grain_window,
            needs=("grain",),
            promised=_ALIKE,
        ),
        Workload(name="Grain `DataLoader`", make=grain_loader, needs=("grain",), promised=_ALIKE),
        Workload(
            name="torchdata `StatefulDataLoader`",
            make=torchdata_map,
            needs=("torchdata",),
            promised=_ALIKE,
        ),
        Workload(
            name="`torchdata.nodes`, prefetch",
            make=torchdata_nodes,
            needs=("torchdata",),
            promised=_ALIKE,
        ),
        Workload(name="mosaicml `StreamingDataLoader`", make=mosaic, needs=("streaming",), promised=_EVERYWHERE),
        Workload(name="litdata `StreamingDataLoader`", make=litdata, needs=("litdata",), promised=_OTHER_RANKS_REFUSED),
        Workload(name="`datasets` stream", make=hf_stream, needs=("datasets",), promised=_ALIKE),
        Workload(
            name="`datasets` stream, shuffle buffer, `replay=True`",
            make=hf_buffer,
            needs=("datasets",),
            promised=_ALIKE,
        ),
        Workload(name="WebDataset stream, `replay=True`", make=webdataset, needs=("webdataset",), promised=_ALIKE),
        Workload(name="stream without state, `replay=True`", make=plain, promised=_ALIKE),
        *(
            Workload(name=f"{name}, bare", make=made, needs=(needs,), promised=promised)
            for name, made, needs, promised in (
                ("torchdata `StatefulDataLoader`", bare(torchdata_map), "torchdata", _ALIKE),
                ("`torchdata.nodes`", bare(torchdata_nodes), "torchdata", _ALIKE),
                ("Grain iterator", grain_bare, "grain", _ALL_REFUSED),
                ("mosaicml", bare(mosaic), "streaming", _EVERYWHERE),
                ("litdata", bare(litdata), "litdata", _ALL_REFUSED),
                ("`datasets` stream", bare(hf_stream), "datasets", _ALL_REFUSED),
                ("`datasets` stream, shuffle buffer", hf_buffer_bare, "datasets", _ALL_REFUSED),
            )
        ),
        Workload(name="stream without state", make=plain_bare, promised=_ALL_REFUSED),
        Workload(
            name="`StatefulDataLoader` of it",
            make=torchdata_bare,
            needs=("torchdata",),
            promised=_ALL_REFUSED,
        ),
    )
}


def prepare(folder: Path) -> None:
    """Write the numbers in the formats of the libraries that are there."""
    import io
    import tarfile

    (folder / "tars").mkdir(parents=True)
    for shard in range(4):
        with tarfile.open(folder / f"tars/{shard}.tar", "w") as tar:
            for index in range(shard, SAMPLES, 4):
                member = tarfile.TarInfo(f"{index:06}.txt")
                member.size = len(data := str(index).encode())
                tar.addfile(member, io.BytesIO(data))
    if importlib.util.find_spec("streaming"):
        without_torchvision()
        from streaming import MDSWriter

        with MDSWriter(out=str(folder / "mosaic"), columns={"id": "int"}, size_limit=200) as out:
            for index in range(SAMPLES):
                out.write({"id": index})
    if importlib.util.find_spec("litdata"):
        _write_litdata(folder / "litdata")


def _write_litdata(folder: Path) -> None:
    from litdata.streaming.cache import Cache

    folder.mkdir()
    cache = Cache(str(folder), chunk_size=6)
    for index in range(SAMPLES):
        cache[index] = {"id": index}
    cache.done()
    cache.merge()


__all__ = ["EPOCHS", "EXACT", "REFUSED", "TRIALS", "WORKLOADS", "Place", "Workload", "ids_of", "prepare"]
