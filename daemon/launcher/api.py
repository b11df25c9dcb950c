"""The launcher for programs that call torch's as an API: `elastic_launch` with dlrun's agent."""

from __future__ import annotations

import os
from typing import Any

from torch.distributed.launcher import api as launcher_api

from flashckpt.daemon.launcher.launch import launch
from flashckpt.daemon.launcher.options import AgentOptions
from flashckpt.daemon.zygote.client import ZygoteClient
from flashckpt.environment import env


class elastic_launch(launcher_api.elastic_launch):  # noqa: N801 -- torch's name
    """Takes the place of torch's: the same arguments and the same result, `{rank: what it returned}`.

    A command is forked and restarted as dlrun does; a function is started as torch starts it, and restarted with dlrun's
    environment. `LaunchConfig.max_restarts` counts restarts without progress.
    """

    def __call__(self, *args: Any) -> dict[int, Any]:
        """Run the job.

        Raises:
            SystemExit: It was stopped on request and its state is kept (75).
            ChildFailedError: Ranks failed and no restart was left.
            RestartBudgetError: The same error came at the same step twice.
        """
        config, entrypoint = self._config, self._entrypoint
        options = AgentOptions(
            endpoint=config.rdzv_endpoint,
            survivors_s=env.TORCH_ELASTIC_SHUTDOWN_TIMEOUT,
            wait_flush=os.getpid() == 1,
            min_nodes=config.min_nodes,
        )
        zygote = ZygoteClient(disabled="" if isinstance(entrypoint, str) else "a function is not forked")
        zygote.prepare()
        return launch(config, entrypoint or "", list(args), zygote=zygote, options=options).returned_or_exit()
