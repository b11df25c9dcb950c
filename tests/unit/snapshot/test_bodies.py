"""The form of tensors as C sees it in memory: never the same where torch says that something is another."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import sanitized  # noqa: F401 -- the build with sanitizers, where one is named, comes before flashckpt.native
from torch import nn

from flashckpt.native import is_native
from flashckpt.native.copying import BodyPath
from flashckpt.snapshot import bodies
from flashckpt.snapshot.bodies import FormPaths, Forms, form_paths

pytestmark = pytest.mark.skipif(not is_native(), reason="the C part was not built")


def tensors() -> list[torch.Tensor]:
    base = torch.zeros(6, 4)
    return [
        base,
        base.view(24),
        base[1:3],
        nn.Parameter(torch.zeros(3)),
        nn.Parameter(torch.zeros(4, 4), requires_grad=False),
        torch.zeros((), dtype=torch.float64),
        torch.zeros(0),
        torch.zeros(1, 2, 1, 3, 2),
        torch.zeros(3, dtype=torch.complex64),
        *[torch.zeros(2, 3) for _ in range(40)],
    ]


def other_memory(tensor: torch.Tensor) -> None:
    tensor.data = torch.ones_like(tensor)


def other_dtype(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.view(torch.int32 if tensor.element_size() == 4 else torch.int64)


def turned(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.t()


def reshaped(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.view(-1)


def moved(tensor: torch.Tensor) -> None:
    tensor.data = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)


def negated(tensor: torch.Tensor) -> None:
    tensor.data = torch._neg_view(tensor.data)


def resized(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(tensor.untyped_storage().nbytes() + 4096)


def swapped(tensor: torch.Tensor) -> None:
    torch.utils.swap_tensors(tensor, torch.zeros(5))  # type: ignore[no-untyped-call]  # torch leaves it without types


CHANGES: tuple[Callable[[Any], None], ...] = (
    other_memory,
    other_dtype,
    turned,
    reshaped,
    moved,
    negated,
    resized,
    swapped,
)


def form(tensor: torch.Tensor) -> tuple[Any, ...]:
    storage = tensor.untyped_storage()
    bits = tensor.is_neg(), tensor.is_conj()
    return tensor.dtype, tensor.shape, tensor.stride(), bits, tensor.data_ptr(), storage.data_ptr(), storage.nbytes()


def storages(of: list[torch.Tensor]) -> list[torch.UntypedStorage]:
    return [tensor.untyped_storage() for tensor in of]


def known(of: list[torch.Tensor]) -> Forms:
    forms = Forms(of)
    forms.learn(of, storages(of), lambda: True)
    assert forms.are_known
    return forms


def test_where_forms_lie_is_found_out_for_this_torch() -> None:
    assert form_paths() is not None


@pytest.mark.parametrize("seed", range(20))
def test_what_holds_has_the_form_that_it_had(seed: int) -> None:
    random.seed(seed)
    some = tensors()
    forms, before = known(some), [form(tensor) for tensor in some]
    assert forms.holds(some, 0)
    assert forms.holds_storages(storages(some))
    for tensor in random.sample(some, 12):
        try:
            random.choice(CHANGES)(tensor)
        except (RuntimeError, TypeError):  # a view of something, one without a second dimension
            continue
    kept = [forms.holds([one], at) and forms.holds_storages(storages([one]), at) for at, one in enumerate(some)]
    assert not all(kept)
    assert all(form(one) == was for one, was, holds in zip(some, before, kept, strict=True) if holds)
    assert forms.holds(some, 0) == all(forms.holds([one], at) for at, one in enumerate(some))


def test_what_is_used_and_written_holds() -> None:
    some = tensors()
    forms = known(some)
    leaf = some[3]
    (leaf * leaf).sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it without types
    held = [leaf * leaf, [tensor.detach() for tensor in some], [tensor.view(-1) for tensor in some]]
    with torch.no_grad():
        for tensor in some:
            tensor.add_(1)
    assert forms.holds(some, 0)
    del held
    assert forms.holds(some, 0)
    assert forms.holds_storages(storages(some))


def test_nothing_is_learnt_that_is_not_right_or_lies_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    some, paths = tensors(), form_paths()
    assert paths is not None
    forms = Forms(some)
    forms.learn(some, storages(some), lambda: False)
    assert not forms.are_known
    forms.learn(some, storages([*some[1:], some[0]]), lambda: True)
    assert not forms.are_known
    beside = BodyPath(paths.tensor.to_body - 8, *paths.tensor[1:])  # the type, of which every tensor has one
    monkeypatch.setattr(bodies, "form_paths", lambda: FormPaths(beside, paths.storage))
    forms = Forms(some)
    forms.learn(some, storages(some), lambda: True)
    assert not forms.are_known


def test_what_changes_while_it_is_looked_at_is_not_learnt() -> None:
    some = tensors()
    forms = Forms(some)

    def look() -> bool:
        other_memory(some[5])
        return True

    forms.learn(some, storages(some), look)
    assert not forms.are_known


class Marked(torch.Tensor):
    """A subclass."""


@pytest.mark.parametrize("other", [torch.zeros((1,) * 6), torch.zeros(3).as_subclass(Marked)])
def test_tensors_of_more_dimensions_or_of_other_classes_are_asked(other: torch.Tensor) -> None:
    some = [torch.zeros(2), other]
    forms = Forms(some)
    forms.learn(some, storages(some), lambda: True)
    assert not forms.are_known
    assert not forms.holds(some, 0)


@pytest.mark.parametrize("name", ["_BODY", "_FORMS"])
def test_another_torch_is_left_to_its_own_answers(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    paths = form_paths()
    other: Any = (lambda one: id(one) ^ 8) if name == "_BODY" else (lambda: torch.zeros(3, 5),)
    monkeypatch.setattr(bodies, name, other)
    assert paths is not None
    assert form_paths.__wrapped__() is None
