"""Run PyTorch's own launcher tests against dlrun: `python tests/integration/launcher/upstream_launcher.py PYTORCH_CHECKOUT [PYTEST_ARGS]`.

The tests are not part of PyTorch's wheel, and not of this repository: give a checkout of the matching release (its
`test/distributed` folder is enough), and `pip install expecttest`, which torch's test helpers import.
`torch.distributed.run.main` is dlrun's there, and LocalElasticAgent is ours. What needs etcd is left out.
docs/launching.md lists what passes.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

FILES = {
    "main": ("launcher/test_run.py", "launcher/run_test.py"),
    "agent": ("elastic/agent/server/test/local_elastic_agent_test.py",),
}


def pytest_configure() -> None:
    """Put dlrun in torchrun's place; called by pytest, in the processes that this file starts."""
    _no_etcd()
    from torch.distributed import run as torchrun

    from flashckpt.daemon.launcher import cli as dlrun

    if os.environ["UPSTREAM_PART"] == "main":
        torchrun.main = dlrun.main
        return
    from torch.distributed.elastic.agent.server import local_elastic_agent

    _older_spec()
    local_elastic_agent.LocalElasticAgent = _our_agent()  # type: ignore[misc]


def _no_etcd() -> None:
    from torch.distributed.elastic.rendezvous import etcd_server

    class Nothing:
        def __getattr__(self, _name: str) -> Any:
            return lambda *_args, **_kwargs: "localhost:0"

    etcd_server.EtcdServer = Nothing  # type: ignore[misc,assignment]


def _our_agent() -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

    from flashckpt.daemon.launcher.agent import DlrunAgent
    from flashckpt.daemon.launcher.options import AgentOptions, LaunchOutcome
    from flashckpt.daemon.zygote.client import ZygoteClient

    class Agent(DlrunAgent):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            if (folder := kwargs.pop("log_dir", None)) is not None:  # as older releases spelled it
                kwargs["logs_specs"] = DefaultLogsSpecs(log_dir=folder)
            zygote = ZygoteClient(disabled="functions are entry points here")
            super().__init__(*args, zygote=zygote, options=AgentOptions(), outcome=LaunchOutcome(), **kwargs)

        def run(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().run(*args, **kwargs)
            finally:
                self._stores.may_close = True  # these tests close the rendezvous themselves

    return Agent


def _older_spec() -> None:
    """Older releases gave redirects to the spec; this one gives them to the log specs."""
    from torch.distributed.elastic.agent.server import api

    known = set(inspect.signature(api.WorkerSpec).parameters)

    class WorkerSpec(api.WorkerSpec):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**{name: value for name, value in kwargs.items() if name in known})

    api.WorkerSpec = WorkerSpec  # type: ignore[misc,assignment]


def main(words: list[str]) -> int:
    """Run what the checkout has; returns the worst exit code of pytest."""
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(f"{__doc__}\n")
        return 2
    folder, here, worst = Path(words[0]) / "test" / "distributed", Path(__file__).resolve(), 0
    for part, names in FILES.items():
        for path in (folder / name for name in names):
            if not path.exists():
                continue
            python = os.pathsep.join([str(here.parent), *map(str, here.parents[2:4]), os.environ.get("PYTHONPATH", "")])
            env = {**os.environ, "UPSTREAM_PART": part, "PYTHONPATH": python, "OMP_NUM_THREADS": "1"}
            flags = ["-q", "-p", "upstream_launcher", "-c", os.devnull, "--rootdir", str(folder), "-k", "not etcd"]
            command = [sys.executable, "-m", "pytest", *flags, *words[1:], str(path)]
            worst = max(worst, subprocess.run(command, env=env, check=False).returncode)
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
