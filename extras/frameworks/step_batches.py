"""Micro-batches for a framework that counts epochs in optimizer steps: a fixed number of whole steps in each of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import Sampler

from flashckpt.errors import SamplerStateError
from flashckpt.sampler import ElasticSampler, errors
from flashckpt.sampler.drawing import Drawing
from flashckpt.sampler.iterations import LeadWatch
from flashckpt.sampler.iterator import EpochWalk

_KEPT = (
    "collate_fn",
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)


def same_but_order(loader: Any) -> dict[str, Any]:
    """Return the arguments that make a DataLoader like this one in everything but data set and order."""
    return {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}


class StepBatches(Sampler[list[int]]):
    """Cut the endless stream of an elastic sampler into epochs of equally many optimizer steps.

    Trainer works out once how many steps an epoch has, and gives every step its batches. An epoch here is that many
    whole steps; where the data does not divide, its last step takes the first samples of the next pass over the
    data, so no sample is dropped or repeated. A restored epoch deals what is left of it. What a step really took is
    counted where batches leave the loader: the settings that say how many they are may be changed, or the loader wrapped.

    Args:
        sampler: Tail "span", with a global batch size.
        batch_size: Samples of one micro-batch of this replica.
        steps: Optimizer steps of an epoch.
    """

    flashckpt_replicated = True

    def __init__(self, sampler: ElasticSampler, *, batch_size: int, steps: int) -> None:
        self._order, self._batch_size, self._steps = sampler, batch_size, steps
        self.batch_size = batch_size
        self.done = 0
        self._is_finished = False
        self._drawing: Drawing | None = None
        # of the running iteration: rows dealt, batches left, samples over all replicas
        self._rows = self._left = self._committed = 0
        self._pace = LeadWatch(0)

    @property
    def order(self) -> ElasticSampler:
        """The sampler with the order and the position. Not called `sampler`: its iterators are not used."""
        return self._order

    def __len__(self) -> int:
        """Micro-batches of this replica in a whole epoch."""
        return self._steps * self._micro

    @property
    def _micro(self) -> int:
        return (self._order.global_batch_size or 0) // (self._order.dp_size * self._batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        self._order.was_drawn_from = True
        is_counted = self._committed and self._drawing is not None and self._drawing.is_exact
        if is_counted and not self._left and (lead := self._taken - self._committed):
            raise errors.other_step(self._committed + lead, self._committed, of_epoch=True)
        self._left = 0 if self._is_finished else len(self) - self.done % self._steps * self._micro
        position = self._order.position
        drawing = self._drawing = Drawing(self, lambda: None)
        self._rows, self._committed, self._pace = 0, 0, LeadWatch(0)
        while self._left:
            walk = EpochWalk(self._order, position)
            while self._left and (batch := walk.next_batch(self._batch_size)):
                self._left -= 1
                self._rows += len(batch)
                drawing.cut(self._rows)
                yield batch
            position = self._order.cursor.settled(walk.end)

    def finish(self) -> None:
        """Deal nothing more: the restored step was the last one."""
        self._is_finished = True

    @property
    def was_drawn_from(self) -> bool:
        """See `ElasticSampler`."""
        return self._order.was_drawn_from

    @property
    def restored_stage(self) -> str:
        """See `ElasticSampler.restored_stage`, of epochs that are counted in steps."""
        if not self.done:
            return "unused"
        return "running" if self.done % self._steps else "between"

    @property
    def flashckpt_progress(self) -> tuple[int, int]:
        """What a step moves."""
        return self._order.position, self.done

    @property
    def batches_dealt(self) -> int:
        """Micro-batches of the current epoch in the finished steps."""
        return self.done % self._steps * self._micro

    @property
    def ends_epoch(self) -> bool:
        """Whether the step under way is the last one of its epoch."""
        return (self.done + 1) % self._steps == 0

    @property
    def epochs_done(self) -> float:
        """Epochs so far, with the part of the current one."""
        return self.done / self._steps

    def commit(self, samples: int | None = None) -> None:
        """Count a finished optimizer step.

        Raises:
            SamplerStateError: The loop took fewer batches for it, or takes more in one step after another.
        """
        self._compare(samples or self._order.global_batch_size or 0)
        self._order.commit(samples)
        self.done += 1

    def _compare(self, count: int) -> None:
        drawing = self._drawing
        if drawing is None or not drawing.is_exact or drawing.thread != threading.get_ident():
            return  # another thread fetches ahead, as far as it likes
        lead = self._taken - self._committed - count
        taken = count + lead - self._pace.lead
        unit = self._batch_size * self._order.dp_size
        if lead < 0 or self._pace.grows(lead, taken=taken, unit=unit, by_hand=not drawing.is_loader):
            raise errors.other_step(taken, count)
        self._committed += count

    @property
    def _taken(self) -> int:
        """Samples of the running iteration, over all replicas, that the loop has got: those that workers hold are not."""
        return 0 if self._drawing is None else self._drawing.taken(self._rows) * self._order.dp_size

    def state_dict(self) -> dict[str, Any]:
        """Return the order, the position in it, and the steps done in epochs of so many."""
        return {"order": self._order.state_dict(), "done": self.done, "steps": self._steps}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at a recorded position.

        Raises:
            SamplerStateError: The state belongs to other data, another seed or order.
        """
        if not {"order", "done", "steps"} <= set(state_dict):
            raise SamplerStateError(
                "the state of the data order is not one of this callback",
                found=f"members {sorted(state_dict)}",
                expected="'order', 'done' and 'steps'",
            )
        self._order.load_state_dict(state_dict["order"])
        self._drawing, self._committed = None, 0
        done, steps = int(state_dict["done"]), int(state_dict["steps"])
        # another global batch: the same part of the epoch, in steps of the new size
        self.done = done if steps == self._steps else done // steps * self._steps + done % steps * self._steps // steps
