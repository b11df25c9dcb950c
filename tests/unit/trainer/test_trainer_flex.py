"""FlexAttention computes what attention with a mask does. Forward only: on a CPU it has no backward."""

from __future__ import annotations

import pytest
import torch
from support.training import run_config

from flashckpt.errors import ConfigError
from flashckpt.trainer.config.model import ModelConfig
from flashckpt.trainer.model.transformer import Transformer
from flashckpt.trainer.parallel.distributed import process_group

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
TOKENS = 40
DOCUMENTS = torch.tensor([[0] * 13 + [1] * 27, [3] * 40, [0, 1, 2, 3] + [4] * 36])


@pytest.mark.matrix
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one-document", "several"])
@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_flex_gives_the_logits_of_a_mask(kv_heads: int, window: int, documents: torch.Tensor | None) -> None:
    torch.manual_seed(1)
    config = ModelConfig(dim=64, layers=2, heads=4, kv_heads=kv_heads, ffn=96, vocab=50, window=window, window_from=1)
    model = Transformer(config, TOKENS)
    tokens = torch.randint(50, (3, TOKENS))
    with torch.no_grad():
        masked = model(tokens, documents)
        unmasked = model(tokens)
        model.uses_flex, model._positions = True, None
        flexed = model(tokens, documents)
    assert model._known_positions().window is None, "nothing of T x T is held"
    torch.testing.assert_close(flexed, masked, atol=1e-5, rtol=1e-5)
    assert documents is None or not torch.allclose(unmasked, masked, atol=1e-3)


def test_flex_on_a_cpu_is_refused_before_anything_starts(tmp_path: object) -> None:
    config = run_config(tmp_path, train={"attention": "flex", "device": "cpu"})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="flex needs a GPU"), process_group(config):
        pass
