"""The launch of one node: torch's launch_agent with our agent and rendezvous, and errors that say what to do."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousHandler,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousTimeoutError,
    registry,
)
from torch.distributed.launcher import api as launcher_api

from flashckpt import entry_points
from flashckpt.daemon.launcher.agent import DlrunAgent
from flashckpt.daemon.launcher.elastic_compat import replaced
from flashckpt.daemon.launcher.options import AgentOptions, LaunchOutcome, RendezvousLostError
from flashckpt.daemon.launcher.rendezvous import handler_of
from flashckpt.daemon.machine.process import reap_strays
from flashckpt.daemon.zygote.client import ZygoteClient
from flashckpt.environment import env


def _rendezvous_error(error: Exception, config: Any) -> RendezvousLostError | None:
    """Return the clear error of a rendezvous that failed, None where it was not the rendezvous."""
    if isinstance(error, RendezvousClosedError):
        return RendezvousLostError.closed()
    if isinstance(error, RendezvousStateError):
        return RendezvousLostError.written_by_others(error)
    if "rendezvous" not in type(error).__name__.lower() and config.max_nodes == 1:
        return None
    if isinstance(error, RendezvousTimeoutError) and _answers(config.rdzv_endpoint):
        return RendezvousLostError.too_few(config.min_nodes, config.rdzv_endpoint)
    return RendezvousLostError.at(config.rdzv_endpoint, error)


def _answers(endpoint: str) -> bool:
    """Whether somebody listens where the rendezvous store is: then nodes were missing, not the store."""
    host, _, port = endpoint.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=2.0).close()
    except (OSError, ValueError):
        return False
    return True


def _is_of_torch(factory: Any) -> bool:
    """Whether this is the function that torch defines: it may have been replaced before this module was imported."""
    is_plain = isinstance(factory, FunctionType) and not hasattr(
        factory, "__wrapped__"
    )  # functools.wraps copies __module__
    return is_plain and factory.__module__ == registry.__name__


def launch(
    config: Any, entrypoint: Callable[..., Any] | str, args: list[str], *, zygote: ZygoteClient, options: AgentOptions
) -> LaunchOutcome:
    """Run the job as torch's launch_agent does, with our agent in place of LocalElasticAgent.

    Raises:
        ChildFailedError: workers failed and no restart was left.
        RestartBudgetError: the same error came at the same step twice.
        HangError: the ranks hang, and no restart was left.
        SignalException: dlrun was asked to stop and the workers could not agree on a step.
        PersistError: the workers ended well and a persist step was reached, but nothing is on storage.
    """
    outcome = LaunchOutcome()

    def build(*rest: Any, **kwargs: Any) -> DlrunAgent:
        return DlrunAgent(*rest, zygote=zygote, options=options, outcome=outcome, **kwargs)

    # another agent or rendezvous that somebody has put in place of torch's is kept
    theirs, factory = vars(launcher_api)["LocalElasticAgent"], registry.get_rendezvous_handler

    def meet(params: RendezvousParameters) -> RendezvousHandler:
        return handler_of(params, factory)

    with (
        replaced(launcher_api, "LocalElasticAgent", build if theirs is LocalElasticAgent else theirs),
        replaced(registry, "get_rendezvous_handler", meet if _is_of_torch(factory) else factory),
    ):
        try:
            outcome.returned = launcher_api.launch_agent(config, entrypoint, args)
        except SignalException:
            if not outcome.resume:
                raise
        except (RendezvousError, DistError) as error:
            if (lost := _rendezvous_error(error, config)) is None:
                raise
            raise lost from error
        except ChildFailedError as error:
            if (clearer := outcome.error()) is not None:
                raise clearer from error
            raise
    reap_strays(set())
    if outcome.unpersisted is not None:
        raise outcome.unpersisted
    return outcome


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
        entry_points.refuse_wrong_tasks()
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
