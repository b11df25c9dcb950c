"""The section [parallel] of a run: degrees of the mesh, what data parallelism keeps whole, what is kept for backward. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

BUCKET_MB = 25.0
RECOMPUTE_MODES = "none | full | ffn | every:N | groups:N | selective"


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Degrees of the mesh ("pp", "dp_replicate", "dp_shard", "cp", "tp"); `dp_shard` -1 fills up to the world size.

    Attributes:
        cp: Ranks that share each row: every one holds 1 / cp of its tokens.
        cp_exchange: How their keys and values meet: "gather", all are brought to each rank; "ring", they go round.
        ep: Ranks that share the experts, a divisor of `dp_shard` x `cp`; over the rest of these their weights are cut as others
            are. 0: all of them share the experts, which are then nowhere gathered.
        zero: What is cut over `dp_shard`: 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters; -1: parameters
            (with a pipeline optimizer state), and gradients once per step.
        bucket_mb: MiB of gradients that DDP sends at once.
        reduce_dtype: "bfloat16": FSDP and DDP add up gradients in half the bytes, rounded.
        offload: "state": parameters, gradients and optimizer state lie in host memory, and the optimizer runs there.
        activation_checkpoint: "none", "full", "ffn", "every:N", "groups:N", "selective".
        activation_offload: What forward keeps for backward lies in host memory.
        sync_every: The ranks of one index along "dp_replicate" are a group, which trains apart from the others for so many
            steps; 0: gradients are averaged over all in each step.
        groups: Groups that train apart and are separate runs, each started with its number `group` from 0 on: one that is lost
            is left out of the next synchronisation. 0: they are ranks of one run.
        sync_wait_s: Seconds for which a synchronisation waits for groups of the one before.
        sync_address: Of this machine, for the other groups; "": what its name says.
        outer_rate, outer_momentum: Of the outer optimizer, SGD with Nesterov momentum. 1 and 0: the parameters are averaged.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = -1
    cp: int = 1
    cp_exchange: str = "gather"
    ep: int = 0
    tp: int = 1
    sequence_parallel: bool = True
    loss_parallel: bool = False
    data_parallel: str = "fsdp"
    zero: int = -1
    bucket_mb: float = BUCKET_MB
    reduce_dtype: str = "float32"
    offload: str = "none"
    schedule: str = "1F1B"
    stages_per_rank: int = 0
    layers_per_stage: tuple[int, ...] = ()
    activation_checkpoint: str = "none"
    activation_offload: bool = False
    sync_every: int = 0
    groups: int = 0
    group: int = 0
    sync_wait_s: float = 60.0
    sync_address: str = ""
    outer_rate: float = 0.7
    outer_momentum: float = 0.9
    timeout_s: float = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Recompute:
    """What is computed again in backward.

    Attributes:
        mode: "none", "full" (whole layers), "ffn", "groups" or "selective".
        number: Every how many layers one is (full), or layers of a group (groups); else 0.
    """

    mode: str
    number: int = 0

    @classmethod
    def parse(cls, text: str) -> Recompute | None:
        """Return what `activation_checkpoint` says; None if it is no mode."""
        if text in ("none", "ffn", "selective"):
            return cls(mode=text)
        if text == "full":
            return cls(mode="full", number=1)
        name, _, number = text.partition(":")
        if name in ("every", "groups") and number.isdigit() and int(number) > 0:
            return cls(mode="full" if name == "every" else "groups", number=int(number))
        return None
