"""Every decoder on damaged bytes, a fixed number of them: only FlashckptError comes out. `make fuzz SECONDS=60` goes on longer."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.fuzz_targets import TARGETS, manifest, sealed_manifest
from support.fuzzing import attempt, deep_tuple, fuzz

from flashckpt.core.manifest import decode_manifest, encode_manifest
from flashckpt.errors import DamagedError

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, of its own formats
ROUNDS = {"segment": 40, "catalogue": 150, "torch": 40, "dcp-metadata": 150, "dcp-item": 40, "compressed": 80}
"""Of those that write files or start decoders of torch; the others take 300."""


@pytest.fixture(autouse=True)
def _bounded_memory() -> Iterator[None]:
    """A decoder that allocates what a damaged number says fails here, and takes no other test with it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, hard))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@pytest.mark.matrix
@pytest.mark.parametrize("name", TARGETS)
def test_nothing_but_our_own_errors_comes_out_of_a_decoder(name: str, shm_dir: Path) -> None:
    target = TARGETS[name](shm_dir)
    for raw in target.seeds:
        assert attempt(target, raw), "what was written is read"
    counts = fuzz(target, seed=20, rounds=ROUNDS.get(name, 300))
    assert counts["tried"] >= ROUNDS.get(name, 300)


@settings(max_examples=40, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
@pytest.mark.parametrize("name", ["manifest", "claim", "intent", "ready", "superblock", "slot-header", "sampler-index"])
def test_no_slice_of_good_bytes_with_others_in_it_does_either(
    name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    target = TARGETS[name](tmp_path_factory.getbasetemp())
    good = data.draw(st.sampled_from(list(target.seeds)))
    at, end = sorted(data.draw(st.tuples(*[st.integers(0, len(good))] * 2)))
    raw = good[:at] + data.draw(st.binary(max_size=64)) + good[end:]
    attempt(target, raw)
    if target.reseal is not None:
        attempt(target, target.reseal(raw))


@pytest.mark.parametrize("depth", [60, 70, 200, 330, 5000])
def test_no_depth_of_tuples_overflows_the_stack_of_a_decoder(depth: int) -> None:
    body = msgpack.unpackb(encode_manifest(manifest(0))[32:])
    values = msgpack.packb({"a": deep_tuple(depth)})
    raw = sealed_manifest(b"FCKMANIF\1\0".ljust(32, b"\0") + msgpack.packb(body | {"values": values}))
    if depth < 64:
        decode_manifest(raw)
    else:
        with pytest.raises(DamagedError, match="nested more than 64 deep"):
            decode_manifest(raw)


def test_a_damage_is_the_same_for_the_same_seed(shm_dir: Path) -> None:
    target = TARGETS["claim"](shm_dir)
    assert fuzz(target, 3, 50) == fuzz(target, 3, 50)
