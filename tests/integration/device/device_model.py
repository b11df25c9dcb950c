"""`make test-device`: the trainer's own model trains on the emulated device as on the host."""

from __future__ import annotations

import copy

import pytest
import torch
from support import emulated_device
from support.paths import ROOT

from flashckpt.trainer.config import read_config
from flashckpt.trainer.model.operators import per_token_loss
from flashckpt.trainer.model.transformer import Transformer

pytestmark = pytest.mark.skipif(bool(emulated_device.why_not()), reason=emulated_device.why_not())
STEPS, TOKENS = 3, 64


def losses(model: Transformer, device: str) -> list[float]:
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for step in range(STEPS):
        tokens = torch.randint(256, (2, TOKENS), generator=torch.Generator().manual_seed(step)).to(device)
        optimizer.zero_grad()
        loss = per_token_loss(model(tokens), tokens).mean()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        found.append(loss.item())
    return found


def test_the_trainers_tiny_model_trains_as_on_the_host() -> None:
    emulated_device.install()
    torch.manual_seed(0)
    on_host = Transformer(read_config(ROOT / "configs" / "tiny.toml").model, TOKENS)
    on_device = copy.deepcopy(on_host).to(emulated_device.NAME)
    # to rounding: memory of the emulated device is aligned otherwise, and some processors' products depend on that
    assert losses(on_device, emulated_device.NAME) == pytest.approx(losses(on_host, "cpu"), rel=1e-5)
    assert {parameter.device.type for parameter in on_device.parameters()} == {emulated_device.NAME}
