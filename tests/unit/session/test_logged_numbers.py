"""`ckpt.log`: numbers of a loop for the dashboard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.one_rank import Holder, agent_of_the_test, crash, opened  # noqa: F401 -- fixtures

from flashckpt.errors import ConfigError
from flashckpt.shm.logged_values import waiting


@pytest.mark.parametrize(("name", "value"), [("", 1.0), (7, 1.0), ("x" * 101, 1.0), ("loss", "much"), ("loss", None)])
def test_what_is_no_named_number_is_not_logged(tmp_path: Path, name: Any, value: Any) -> None:
    ckpt = opened(tmp_path / "root", state=Holder(x=1))
    with pytest.raises(ConfigError, match="log"):
        ckpt.log(name, value)
    assert waiting(ckpt._alive().directory.path) == []
    crash(ckpt)


def test_numbers_are_logged_under_the_step_that_is_done(tmp_path: Path) -> None:
    ckpt = opened(tmp_path / "root", state=Holder(x=1))
    ckpt.step(7)
    ckpt.log("loss", torch.tensor(0.5, requires_grad=True))
    ckpt.log("held out", 2, step=5)
    found = waiting(ckpt._alive().directory.path)
    assert [one[1:] for one in found] == [(7, "loss", 0.5), (5, "held out", 2.0)]
    crash(ckpt)
