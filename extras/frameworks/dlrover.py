"""DLRover's call shapes: its elastic sampler and its checkpointers.

    from flashckpt.integrations.dlrover import ElasticDistributedSampler  # was: from dlrover.trainer.torch.elastic.sampler
    from flashckpt.integrations.dlrover import DdpCheckpointer, StorageType  # was: ...torch.flash_checkpoint.ddp
    from flashckpt.integrations.dlrover import FsdpShardCheckpointer, FsdpFullCheckpointer  # was: ...fsdp
    from flashckpt.integrations.dlrover import DeepSpeedCheckpointer  # was: ...torch.flash_checkpoint.deepspeed

Those for Megatron are in `flashckpt.integrations.dlrover_megatron`. DLRover itself is not needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

from flashckpt.errors import SamplerStateError
from flashckpt.integrations.dlrover_checkpoints import (
    DdpCheckpointer,
    FsdpFullCheckpointer,
    FsdpShardCheckpointer,
    StorageType,
)
from flashckpt.integrations.dlrover_deepspeed import DeepSpeedCheckpointer
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


__all__ = [
    "DdpCheckpointer",
    "DeepSpeedCheckpointer",
    "ElasticDistributedSampler",
    "FsdpFullCheckpointer",
    "FsdpShardCheckpointer",
    "StorageType",
]
