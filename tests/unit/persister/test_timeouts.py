"""What the environment says of how long a persister stays is a number of seconds, or an error that names the variable."""

from __future__ import annotations

from dataclasses import fields

import pytest

from flashckpt.daemon.persister.timeouts import DaemonTimeouts
from flashckpt.errors import ConfigError

VARIABLES = ("FLASHCKPT_DAEMON_LINGER", "FLASHCKPT_DAEMON_PATIENCE", "FLASHCKPT_DAEMON_GRACE")


@pytest.mark.parametrize("text", ["abc", "30s", "nan", "inf", "-1", "1,5", "0x10"])
@pytest.mark.parametrize("name", VARIABLES)
def test_wrong_number_names_its_variable(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=f"{name} is no number of seconds") as caught:
        DaemonTimeouts.from_environment()
    assert text in caught.value.found


@pytest.mark.parametrize(("text", "seconds"), [("0", 0.0), ("2.5", 2.5), ("1e3", 1000.0), ("", None)])
def test_number_is_taken_and_nothing_is_the_default(
    text: str, seconds: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, text)
    found, default = DaemonTimeouts.from_environment(), DaemonTimeouts()
    for field in fields(DaemonTimeouts):
        assert getattr(found, field.name) == (getattr(default, field.name) if seconds is None else seconds)
