"""DLRover's call shapes: its elastic sampler and its checkpointers.

    from flashckpt.integrations.dlrover import ElasticDistributedSampler  # was: from dlrover.trainer.torch.elastic.sampler
    from flashckpt.integrations.dlrover import DdpCheckpointer, StorageType  # was: ...torch.flash_checkpoint.ddp
    from flashckpt.integrations.dlrover import FsdpShardCheckpointer, FsdpFullCheckpointer  # was: ...fsdp
    from flashckpt.integrations.dlrover import DeepSpeedCheckpointer  # was: ...torch.flash_checkpoint.deepspeed (0.6.1)

Those for Megatron are in `flashckpt.integrations.dlrover_megatron`. DLRover itself is not needed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sized
from pathlib import Path
from typing import Any

from flashckpt.errors import ConfigError, SamplerStateError
from flashckpt.integrations.deepspeed_fragments import refresh_weights
from flashckpt.integrations.deepspeed_state import EngineState, OneSchedule, Trained
from flashckpt.integrations.dlrover_checkpoints import (
    DdpCheckpointer,
    Flash,
    FsdpFullCheckpointer,
    FsdpShardCheckpointer,
    Given,
    StorageType,
)
from flashckpt.sampler import ElasticSampler
from flashckpt.sampler.order.state import whole


class ElasticDistributedSampler(ElasticSampler):
    """An `ElasticSampler` with the arguments and the state of DLRover's sampler of this name.

    The loop says how far it is when it saves, `sampler.state_dict(iter_step, micro_batch_size)`, and nothing is
    committed: an epoch that was iterated to its end counts as trained. A restored epoch deals what is left of it, on
    any number of replicas. With a `Checkpointer` that tracks the sampler use `ElasticSampler`.

    Args:
        dataset: The data set.
        num_replicas: Number of replicas; None takes the process group's.
        rank: Index of this one; the same.
        shuffle: False deals in sequence.
        seed: Of the order. The order is not DLRover's.
        drop_last: Drop what does not divide over the replicas; else samples of the epoch are repeated.
    """

    def __init__(  # noqa: PLR0917 -- the positions of DLRover's, whose place it takes
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        tail = "drop" if drop_last else "pad"
        super().__init__(dataset, num_replicas, rank, shuffle, seed, tail=tail, auto_commit=True)
        self.place_is_assumed = False  # DLRover's replicas are ranks
        self._begun = 0  # the epoch being iterated: the position is in the next one as soon as a loader has fetched all

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, or continue the one that was restored; one that was restored at its end deals nothing."""
        self._again, epoch = None, whole("epoch", epoch)
        if epoch == self._restored_end and epoch < self.epoch:
            self._again = epoch
        else:
            super().set_epoch(epoch)
        self._begun = epoch

    def __iter__(self) -> Iterator[int]:  # type: ignore[override]  # the iterator is one of ElasticSampler's
        if self._again is None:
            self._begun = self.epoch
        return super().__iter__()

    def state_dict(self, iter_step: float | None = None, micro_batch_size: int | None = None) -> dict[str, Any]:
        """Return the place in the data.

        Args:
            iter_step: Steps of this epoch that are trained, those before a restore included; parts of one may be too.
            micro_batch_size: Samples of one of them on one replica. Without the two: as `ElasticSampler`.
        """
        if iter_step is None or micro_batch_size is None:
            return super().state_dict()
        step, size = (getattr(one, "item", lambda one=one: one)() for one in (iter_step, micro_batch_size))
        done = whole("iter_step * micro_batch_size", step * size)  # not in numpy's types, which overflow
        return {"completed_num": done * self.dp_size, "epoch": self._begun}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at a place that `state_dict` gave.

        Raises:
            SamplerStateError: It is no such place.
        """
        if "completed_num" not in state_dict:
            super().load_state_dict(state_dict)
            self._begun = self.epoch
            return
        done, epoch = state_dict["completed_num"], state_dict.get("epoch", 0)
        if type(done) is not int or type(epoch) is not int or done < 0 or epoch < 0:
            raise SamplerStateError(
                "the state of the data order is not one of this sampler",
                found=f"completed_num {done!r:.40}, epoch {epoch!r:.40}",
                expected="two whole numbers from 0 on",
            )
        self._check_idle("a sampler state is loaded")
        done = min(done, self.length)  # padding counts too
        self.jump(epoch * self.length + done, is_end=done == self.length)
        self._begun = epoch


class DeepSpeedCheckpointer(Flash):
    """Takes DLRover's `DeepSpeedCheckpointer`'s place, for engines with ZeRO 0 to 3.

    The engine is tracked and read where it lies; it is copied beside the next forward and backward. It comes back on any
    number of ranks and in another stage: `flashckpt.integrations.deepspeed` says what of it, and what is refused. The
    position in the data is the caller's: in `client_state`, or with that module's `FlashCheckpoint`.

    Args:
        engine: What `deepspeed.initialize` returned.
        checkpoint_dir: The root: a folder or a URL.
        comm_backend: Not used.
        deletion_strategy: Must be None.
        save_timeout: Not used: a commit that is late is late.
        **options: Of `flashckpt.Checkpointer`.

    Raises:
        ConfigError: An argument is wrong, or the engine keeps state where no snapshot would find it.
    """

    def __init__(
        self,
        engine: Any,
        checkpoint_dir: str,
        comm_backend: str = "",
        deletion_strategy: Any = None,
        save_timeout: float = 600,
        **options: Any,
    ) -> None:
        from flashckpt.integrations.deepspeed_refusals import refuse_unsupported

        del comm_backend, save_timeout
        refuse_unsupported(engine)
        super().__init__(checkpoint_dir, deletion_strategy, 0, options)
        self._engine, self._root, self._trained = engine, os.fspath(checkpoint_dir), Trained(engine)
        self._client = Given(is_replicated=True)
        self._hook: Any = None

    def save_checkpoint(
        self,
        save_dir: str,
        tag: Any = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        storage_type: StorageType = StorageType.DISK,
    ) -> None:
        """Keep the engine and `client_state`, which must be the same on all ranks; the same call on every rank.

        Its step is `engine.global_steps`, whatever the tag; once after each optimizer step. Without a `load_checkpoint`
        before the first save the run begins from scratch: what the root has is abandoned.

        Raises:
            ConfigError: The engine has not stepped since the last save, or an argument is wrong.
            UnsupportedStateError: `client_state` has something that a snapshot cannot hold; names it.
        """
        del tag, save_latest
        if not self._is_open:
            self._begin(fresh=True)
        self._trained.look()
        self._client.state = dict(client_state or {})
        self._save(self._engine.global_steps, "" if self._is_root(save_dir) else save_dir, storage_type)

    def load_checkpoint(  # noqa: PLR0917 -- the positions of DLRover's, whose place it takes
        self,
        load_dir: str,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Fill the engine with the newest state, from memory if all ranks have it there, else from storage. Collective.

        Returns:
            The root and the `client_state` of the save; None and None, as DeepSpeed has it, where there is nothing.

        Raises:
            ConfigError: A tag or another place is given, a part of the state is asked for, or it is loaded already.
        """
        is_whole = load_module_strict and load_optimizer_states and load_lr_scheduler_states
        if load_module_only or custom_load_fn is not None or not is_whole:
            raise ConfigError(
                "a state is loaded whole",
                found="an argument of load_checkpoint() that asks for part of it",
                state="Nothing was loaded.",
                remedy="weights alone: flashckpt.integrations.deepspeed.FlashCheckpoint(...).restore(only='model.*')",
            )
        if tag is not None:
            raise ConfigError(
                "a checkpoint is not loaded by its tag",
                found=f"tag={tag!r}",
                expected="None: the newest state of the root",
                remedy="leave it out; FlashCheckpoint(...).restore(step=N) takes an older one of `flashckpt ls`",
            )
        self._refuse_path("" if self._is_root(load_dir) else load_dir)
        if not self._begin(fresh=False):
            return None, None
        refresh_weights(self._engine)
        return self._root, self._client.state

    def close(self) -> None:
        """End the job cleanly: nothing stays in memory. DLRover's class has no such method."""
        if self._hook is not None:
            self._hook.remove()
        super().close()

    def _begin(self, *, fresh: bool) -> int:
        self._trained.look()
        schedule = self._engine.lr_scheduler
        state, scheduler = EngineState(self._engine, self._trained), None if schedule is None else OneSchedule(schedule)
        self._hook = self._trained.inner.register_step_pre_hook(lambda *_: self.checkpointer.fence())
        return self._open(fresh=fresh, engine=state, scheduler=scheduler, client=self._client, rng=True)

    def _is_root(self, place: str | None) -> bool:
        return place is None or str(place) == self._root or Path(place).absolute() == Path(self._root).absolute()


__all__ = [
    "DdpCheckpointer",
    "DeepSpeedCheckpointer",
    "ElasticDistributedSampler",
    "FsdpFullCheckpointer",
    "FsdpShardCheckpointer",
    "StorageType",
]
