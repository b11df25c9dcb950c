"""Products by oneDNN are those of torch, with the same bits each time, and only where MKL leaves AVX-512 unused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from flashckpt.trainer.model import joint
from flashckpt.trainer.model.joint import Linear, onednn_is_faster, product

has_onednn = pytest.mark.skipif(not joint.has_onednn(), reason="this build of torch has no oneDNN")
CHOICES = {
    "amd": ("AuthenticAMD", "AVX512", True, True),
    "intel": ("GenuineIntel", "AVX512", True, False),
    "amd without AVX-512": ("AuthenticAMD", "AVX2", True, False),
    "not MKL": ("AuthenticAMD", "AVX512", False, False),
}


@pytest.fixture(autouse=True)
def choose_again() -> Iterator[None]:
    yield
    onednn_is_faster.cache_clear()


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def by_onednn(monkeypatch: pytest.MonkeyPatch, *, whether: bool = True) -> None:
    monkeypatch.setattr(joint, "onednn_is_faster", lambda: whether)


@has_onednn
@pytest.mark.parametrize(
    ("a", "b"),
    [
        (random(32, 24), random(24, 40)),
        (random(32, 24), random(40, 24).t()),
        (random(24, 32).t(), random(24, 40)),
        (random(24, 32).t(), random(40, 24).t()),
        (random(33, 48)[:, 8:31], random(46, 7)[::2]),
    ],
)
def test_a_product_of_matrices_and_their_views_is_right(a: Tensor, b: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    by_onednn(monkeypatch)
    found = product(a, b)
    assert found.is_contiguous()
    torch.testing.assert_close(found, (a.double() @ b.double()).float(), rtol=1e-5, atol=1e-5)


@has_onednn
def test_the_same_rows_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever they lie in memory, which differs after a restart, and beside whichever rows, which differ between layouts."""
    by_onednn(monkeypatch)
    a, b = random(256, 96), random(96, 80)
    expected = product(a, b)
    memory = torch.empty(a.numel() + 64)
    for offset in (1, 3, 7, 16, 33):
        moved = memory[offset : offset + a.numel()].view(a.shape).copy_(a)
        assert torch.equal(product(moved, b), expected)
    assert torch.equal(product(a[64:128], b), expected[64:128])


@has_onednn
def test_few_rows_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    by_onednn(monkeypatch)
    with torch.profiler.profile() as profile:
        product(random(15, 8), random(8, 8))
        product(random(16, 8), random(8, 8))
    names = [event.key for event in profile.key_averages()]
    assert "aten::mm" in names
    assert "mkldnn::_linear_pointwise" in names


@has_onednn
@pytest.mark.parametrize("choice", CHOICES)
def test_onednn_computes_where_mkl_leaves_avx_512_unused(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vendor, capability, has_mkl, expected = CHOICES[choice]
    monkeypatch.setattr(joint, "_vendor", lambda: vendor)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: has_mkl)
    onednn_is_faster.cache_clear()
    assert onednn_is_faster() is expected


@pytest.mark.parametrize("whether", [pytest.param(True, marks=has_onednn), False])
@pytest.mark.parametrize("shape", [(2, 16, 32), (20, 32)])
def test_a_layer_has_the_values_and_gradients_of_torchs(
    shape: tuple[int, ...], whether: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_onednn(monkeypatch, whether=whether)
    layer, x = Linear(32, 24, bias=False), random(*shape).requires_grad_()
    out = layer(x)
    assert "_Linear" in out.grad_fn.name()
    grad = random(*out.shape)
    found = torch.autograd.grad(out, [x, layer.weight], grad)
    layer.joint = False
    plain = layer(x)
    torch.testing.assert_close(out, plain, rtol=1e-5, atol=1e-5)
    for one, other in zip(found, torch.autograd.grad(plain, [x, layer.weight], grad), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
