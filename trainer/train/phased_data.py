"""The data of a run whose phases change the length, the weights or the number of samples of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flashckpt.errors import ConfigError, SamplerStateError
from flashckpt.sampler import ElasticSampler
from flashckpt.trainer.config import RunConfig
from flashckpt.trainer.data.mixed import MixedDataset
from flashckpt.trainer.data.training_data import TrainingData
from flashckpt.trainer.data.windows import Batch, Data
from flashckpt.trainer.train.phases import Phase, phase_at


class PhasedSampler:
    """The sampler of the phase that runs, and which phase that is: what a snapshot takes."""

    flashckpt_replicated = True

    def __init__(self, data: PhasedData) -> None:
        self._data = data

    @property
    def was_drawn_from(self) -> bool:
        """See ElasticSampler."""
        return bool(getattr(self._data.inner, "was_drawn_from", True))

    @property
    def flashckpt_progress(self) -> tuple[int, Any]:
        """The stream, and the position in it."""
        return self._data.phase.stream, self._data.inner.flashckpt_progress

    def commit(self, samples: int | None = None) -> None:
        """Move the position behind the samples of a step."""
        self._data.inner.commit(samples)
        if (position := self._data.next_position) is not None:
            self._data.go_to(position)

    def leave_out(self, done: int, first: int, last: int) -> tuple[int, str]:
        """See ElasticSampler; an order that has yet to begin will do so behind what is left out of it, from its first step on.

        Raises:
            SamplerStateError: groups train shares of the samples, and what one leaves out another would train again.
        """
        if self._data.in_shares:
            raise SamplerStateError("the share of one group ends where that of another begins")
        inner, samples, here = self._data.inner, Counter[int](), self._data.phase.stream
        begin = inner.position
        for step in range(done + 1, last + 1):
            phase = phase_at(self._data.phases, step)
            size = phase.config.train.global_batch
            if step >= first or phase.stream != here:
                samples[phase.stream] += size
            else:
                begin = inner.cursor.after_step(begin, size)
        for stream, count in samples.items():
            if stream == here:
                inner.skip(begin, inner.cursor.after_step(begin, count))
            else:
                self._data.skipped[stream] = self._data.skipped.get(stream, 0) + count
        return samples.total(), f"of streams {', '.join(map(str, samples))}"

    def state_dict(self) -> dict[str, Any]:
        """Return the phase and the state of its sampler."""
        phase = self._data.phase
        return {
            "phase": phase.number,
            "seq_len": phase.config.train.seq_len,
            "skipped": {str(stream): end for stream, end in self._data.skipped.items()},
            "state": self._data.inner.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a recorded phase, and to the position in it.

        Raises:
            ConfigError: phases that had begun are other ones now.
            SamplerStateError: see ElasticSampler.
        """
        if "phase" not in state:  # recorded before the run had phases
            self._data.load(0, {}, state)
            return
        number, phases = int(state["phase"]), self._data.phases
        if number >= len(phases) or phases[number].config.train.seq_len != state["seq_len"]:
            raise ConfigError(
                "this run cannot resume: a phase was changed after it had started",
                found=f"{len(phases) - 1} phases"
                + (
                    f", phase[{number - 1}] of seq_len {phases[number].config.train.seq_len}"
                    if number < len(phases)
                    else ""
                ),
                expected=f"phase[{number - 1}] of seq_len {state['seq_len']}, as in the checkpoint",
                state="Nothing was trained; the checkpoint is untouched.",
                remedy="change only phases that are still to come, or start a new run with another checkpoint.root",
            )
        self._data.load(number, {int(key): int(end) for key, end in state["skipped"].items()}, state["state"])


class PhasedData:
    """This rank's batches, phase after phase.

    Phases with samples of one length draw from one order, and each continues where the one before it stopped; samples
    of another length are other samples, in a separate order.

    Args:
        build: Makes the data of one phase; it is given the configuration and the seed of the order.
        in_shares: The position jumps: another group may train what follows.

    Attributes:
        next_position: Where the position goes when the step under way is committed; None: behind its samples.
        skipped: By stream: end of what a rollback wants left out at its beginning.
    """

    def __init__(
        self, phases: Sequence[Phase], build: Callable[[RunConfig, int], TrainingData], *, in_shares: bool = False
    ) -> None:
        self.phases, self._build, self.in_shares = phases, build, in_shares
        self.next_position: int | None = None
        self._kept: Callable[[Any], Any] = lambda samples: samples
        self.skipped: dict[int, int] = {}
        self.phase = phases[0]
        self._data = self._opened(phases[0])
        self._sampler = PhasedSampler(self) if len(phases) > 1 or in_shares else None

    @property
    def sampler(self) -> Any:
        """What is tracked: the sampler itself where the run has one phase and one share."""
        return self._sampler or self.inner

    def go_to(self, position: int) -> None:
        """Continue at a position of the stream."""
        epoch, offset = divmod(position, self.inner.length)
        self.inner.load_state_dict({**self.inner.state_dict(), "epoch": epoch, "offset": offset})
        self.next_position = None

    @property
    def inner(self) -> ElasticSampler:
        """The sampler of the phase that runs."""
        return self._data.sampler

    @property
    def dataset(self) -> Data:
        """The training split of the phase that runs."""
        return self._data.dataset

    def keep(self, kept: Callable[[Any], Any]) -> None:
        """Read windows of this phase and of later ones through `kept(samples)`."""
        self._kept = kept
        self._read_through(self._data)

    def _read_through(self, data: TrainingData) -> None:
        if isinstance(data.dataset, MixedDataset):  # the bytes of a small corpus are at hand
            data.dataset.rows = self._kept(data.dataset.samples)

    def enter(self, phase: Phase) -> None:
        """Continue with a phase: in the order of the one before, or at the beginning of another."""
        state, before = self.inner.state_dict(), self.phase
        self._replace(phase)
        if phase.stream == before.stream:
            self.inner.load_state_dict(state)
        elif end := self.skipped.pop(phase.stream, 0):
            self.inner.skip(0, end)
        self._weigh(before)

    def load(self, number: int, skipped: dict[int, int], state: Mapping[str, Any]) -> None:
        """Go to a phase and to a recorded position in it."""
        self.skipped = skipped
        self._replace(self.phases[number])
        self.inner.load_state_dict(state)

    def next(self) -> Batch:
        """See TrainingData."""
        return self._data.next()

    def global_ids(self) -> list[int]:
        """See TrainingData."""
        return self._data.global_ids()

    def close(self) -> None:
        """See TrainingData."""
        self._data.close()

    def _replace(self, phase: Phase) -> None:
        self._data.close()
        self.phase, self._data = phase, self._opened(phase)

    def _opened(self, phase: Phase) -> TrainingData:
        # the weights that the order began with: later ones are in the state of its sampler
        first = next(one for one in self.phases if one.stream == phase.stream)
        sources = first.config.data.sources
        config = replace(phase.config, data=replace(phase.config.data, sources=sources))
        data = self._build(config, phase.config.train.seed + phase.stream * 1_000_003)
        self._read_through(data)
        return data

    def _weigh(self, before: Phase) -> None:
        mine, first = self.phase.config.data.sources, next(p for p in self.phases if p.stream == self.phase.stream)
        last = before.config.data.sources if before.stream == self.phase.stream else first.config.data.sources
        if [one.weight for one in mine] != [one.weight for one in last]:
            self.inner.set_weights({f"{number} {one.channel}": one.weight for number, one in enumerate(mine)})
