"""The agent's options, how a launch ended, and the errors that end one (torch-free)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashckpt.daemon.launcher.budget import ESCALATE, REFILL_STEPS
from flashckpt.errors import RESUME_EXIT_CODE, FlashckptError, HangError, LayoutError, PersistError, RestartBudgetError


@dataclass(frozen=True, kw_only=True)
class AgentOptions:
    """The settings that dlrun adds to torchrun's.

    Attributes:
        job: The job's name, where the user gave one by --rdzv-id.
        endpoint: Host and port of the rendezvous.
        restarts_chosen: Whether the user gave --max-restarts; see Budget.
        survivors_s: Seconds that survivors of a failure get between SIGTERM and SIGKILL; 0 kills at once.
        grace_s: Seconds an agreed stop may take before the workers are killed.
        ledger: A file that gets one JSON line per failure, besides the job directory's own.
        log_dir: Folder of --log-dir; "" where it was not given.
        hang_s: Seconds without a step that count as a hang; 0 switches it off, None learns it from the steps.
        refill_steps: New steps between two failures that give the restart budget back; 0 never.
        escalate: How often the same failure at one step goes one state further back before it ends the job; 0 never.
        restore_step: The step to go back to until the job has trained; -1: the newest.
        wait_flush: Do not exit until the daemon has persisted the newest snapshot or grace_s has passed.
        node_check: Look for bad and slow nodes before the first generation, and leave them out.
        min_nodes: Fewest nodes the job runs on.
        node_unit: The job runs on multiples of this many nodes; the others wait.
        warm: module:function that a copy of the zygote calls for the workers of the next generation.
        standbys: Processes of this node that make their contexts ahead of a restart.
    """

    job: str = ""
    endpoint: str = ""
    restarts_chosen: bool = True
    survivors_s: float = 0.0
    grace_s: float = 60.0
    ledger: str = ""
    log_dir: str = ""
    hang_s: float | None = None
    refill_steps: int = REFILL_STEPS
    escalate: int = ESCALATE
    restore_step: int = -1
    wait_flush: bool = False
    node_check: bool = False
    min_nodes: int = 1
    node_unit: int = 1
    warm: str = ""
    standbys: int = 0


@dataclass(kw_only=True)
class LaunchOutcome:
    """How the launch ended, for the exit code: stopped on request, hung, or failed with a repeated error (`remedy`: what to do about it).

    `refused` is the exit code of a rank whose error a restart cannot fix, `passing` of one that what it needs could not
    be reached; `elsewhere` names what ended the job if that was on another node;
    `unpersisted` is the error of a job that ended well and has nothing on storage; `returned` what functions returned.
    """

    resume: bool = False
    hang: str = ""
    repeats: str = ""
    remedy: str = ""
    refused: int = 0
    passing: int = 0
    elsewhere: str = ""
    unpersisted: PersistError | None = None
    returned: dict[int, Any] = field(default_factory=dict)

    def returned_or_exit(self) -> dict[int, Any]:
        """Return what the ranks returned.

        Raises:
            SystemExit: They were stopped on request: a caller that continues would take the job for done.
        """
        if self.resume:
            raise SystemExit(RESUME_EXIT_CODE)
        return self.returned

    def error(self) -> FlashckptError | None:
        """Return the error to end with after workers failed; None if their own failure is the clearest one."""
        if self.refused and self.elsewhere:
            return RefusedError.elsewhere(self.refused)
        if self.refused:
            return RefusedError("the job cannot start: see the error reported by a rank above", exit_code=self.refused)
        if self.repeats:
            return RestartBudgetError(self.repeats, remedy=self.remedy)
        if self.hang:
            return HangError(self.hang, state="All ranks were killed.", remedy=self.remedy)
        if self.passing:
            return UnreachableError(self.passing)
        return FailedElsewhereError(self.elsewhere) if self.elsewhere else None


class RefusedError(FlashckptError):
    """A rank reported an error that a restart cannot fix; dlrun ends with that rank's exit code."""

    def __init__(self, problem: str, *, exit_code: int) -> None:
        self.exit_code = exit_code
        super().__init__(problem)

    @classmethod
    def size(cls, nodes: int) -> RefusedError:
        """Return the error of a job whose layout does not fit the nodes it has."""
        problem = f"the job's layout does not fit {nodes} nodes, and no others joined in time"
        return cls(problem, exit_code=LayoutError.exit_code)

    @classmethod
    def elsewhere(cls, exit_code: int) -> RefusedError:
        """Return the error of a node whose job was refused by a rank of another one."""
        return cls(
            "the job cannot start: see the error reported by a rank of another node in its log", exit_code=exit_code
        )


class CommandError(FlashckptError):
    """The script, module or program to run is not there."""

    exit_code = 2

    @classmethod
    def missing(cls, what: str, name: str) -> CommandError:
        """Return the error of a script, module or program that was not found."""
        return cls(
            f"there is no {what} {name!r}",
            expected=f"a {what} to run on every rank, found from {Path.cwd()}",
            state="Nothing was started.",
            remedy=f"dlrun [OPTIONS] {'-m MODULE' if what == 'module' else what.upper()} [ARGUMENTS]",
        )


class UnreachableError(FlashckptError):
    """Storage or a network that a rank needs could not be reached, and no restart is left; dlrun ends with that rank's exit code."""

    def __init__(self, exit_code: int) -> None:
        self.exit_code = exit_code
        super().__init__(
            "storage could not be reached, and no restart is left",
            remedy="start the job again once it can be: its state is kept",
        )


class FailedElsewhereError(FlashckptError):
    """The failure began on another node, and no restart is left."""

    exit_code = 1


class RendezvousLostError(FlashckptError):
    """The rendezvous store cannot be reached: nodes can no longer find each other."""

    exit_code = 1

    @classmethod
    def at(cls, endpoint: str, error: Exception) -> RendezvousLostError:
        """Return the error that names the host of the store."""
        return cls(
            f"the agent at {endpoint} hosted the rendezvous store and cannot be reached",
            found=f"{type(error).__name__}: {error}",
            state="The workers of this node were ended; complete snapshots are persisted by the daemon.",
            remedy="start the job again; docs/launching.md says how to keep the store on a node that does not train",
        )

    @classmethod
    def too_few(cls, nodes: int, endpoint: str) -> RendezvousLostError:
        """Return the error of a round that too few nodes joined in time."""
        return cls(
            f"fewer than {nodes} nodes met at {endpoint} in time",
            found="the join timeout has passed",
            expected=f"dlrun on {nodes} nodes (--nnodes), with the same --rdzv-id and --rdzv-endpoint",
            state="No worker was started in this round; complete snapshots are persisted by the daemon.",
            remedy="start the other nodes, or wait longer for them: --rdzv-conf join_timeout=SECONDS",
        )

    @classmethod
    def written_by_others(cls, error: Exception) -> RendezvousLostError:
        """Return the error of a store that holds data which no node of this job wrote."""
        return cls(
            "the rendezvous store holds data that no node of this job wrote",
            found=str(error),
            state="None of it was used. The workers of this node were ended; the daemon persists complete snapshots.",
            remedy="give all nodes the same FLASHCKPT_JOB_SECRET, and close the port of the rendezvous to others",
        )

    @classmethod
    def closed(cls) -> RendezvousLostError:
        """Return the error of a node whose job was ended by another one."""
        return cls(
            "another node has ended the job",
            state="The workers of this node were ended; complete snapshots are persisted by the daemon.",
            remedy="look for the cause in the log of the other nodes",
        )


class NodeCheckError(FlashckptError):
    """The node check rejected this node, or left too few good nodes."""

    exit_code = 38
