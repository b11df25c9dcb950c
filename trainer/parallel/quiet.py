"""Forward passes beside training that leave no trace in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from flashckpt.trainer.parallel.apply import Parallel


@contextmanager
def quiet(parallel: Parallel) -> Iterator[None]:
    """Run without dropout; leave the random state and the parameters as they are."""
    device = parallel.device
    if device.type in ("cpu", "meta"):
        random_state = torch.random.fork_rng(devices=[])
    else:
        random_state = torch.random.fork_rng(devices=[device], device_type=device.type)
    with random_state:
        for part in parallel.parts:
            part.eval()
        try:
            yield
        finally:
            parallel.reshard()
            for part in parallel.parts:
                part.train()
