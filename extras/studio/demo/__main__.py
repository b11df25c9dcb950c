"""`make demo`: train 2x2x2 on real text, kill a rank, lose nothing; then lose the machine's memory, lose nothing.

1. The unbroken run: the same configuration, not disturbed.
2. The run that is killed: SIGKILL to one rank in the middle of a step; it continues from host memory.
3. The same run loses its machine: every process killed, shared memory deleted; it is started again and
   continues from the checkpoint on disk.
At the end the loss of every step is compared with the unbroken run, bit for bit, and the model of the killed run
says a few words.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from flashckpt.daemon.launcher import ledger
from flashckpt.errors import ConfigError, FlashckptError, JobInUseError
from flashckpt.trainer.config import RunConfig, read_config
from flashckpt.trainer.demo.report import (
    Comparison,
    compare_traces,
    draw,
    read_restores,
    recovery_facts,
    recovery_table,
)
from flashckpt.trainer.demo.run import DemoRun, forget_job, prepare_text, say_words, without_library
from flashckpt.trainer.parallel.layout import resolve_layout

EVERY = 10


class Progress:
    """Shows the progress of a run."""

    def __init__(self, console: Console, *, steps: int, name: str) -> None:
        self._console, self._steps, self._name = console, steps, name
        self._bar: Bar | None = None
        self._task = TaskID(0)
        self._printed = 0

    def __enter__(self) -> Progress:  # noqa: PYI034 -- typing.Self needs Python 3.11
        if self._console.is_terminal:
            columns = (
                TextColumn("  {task.description}"), BarColumn(bar_width=30), MofNCompleteColumn(),
                TextColumn("{task.fields[text]}"), TimeElapsedColumn(),
            )  # fmt: skip
            self._bar = Bar(*columns, console=self._console, transient=False)
            self._task = self._bar.add_task(self._name, total=self._steps, text="starting")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, trace: Sequence[Mapping[str, Any]]) -> None:
        """Show the newest step of a trace."""
        if not trace:
            return
        step, loss = int(trace[-1]["step"]), float.fromhex(trace[-1]["loss"])
        if self._bar is not None:
            self._bar.update(self._task, completed=step, text=f"loss {loss:.4f}")
        elif step // EVERY != self._printed // EVERY:
            self._console.print(f"  step {step}/{self._steps}  loss {loss:.4f}")
        self._printed = step

    def note(self, text: str) -> None:
        """Print an event without disturbing the live line."""
        self._console.print(f"  [yellow]{text}[/yellow]")


RANKS = 8
DEFAULT_CONFIG = Path(__file__).absolute().parents[2] / "configs" / "demo.toml"
STALE_S = 90.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoPlan:
    """When what happens. Steps count from 1; the kill falls into the middle of the step after `kill_after`."""

    folder: Path
    config: Path
    steps: int
    kill_after: int
    kill_rank: int
    lose_after: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Crash:
    """One crash: last finished step, step restored, and seconds until the next trained step."""

    after: int
    restored: int
    seconds: float


class Demo:
    """Runs the plan and reports on it."""

    def __init__(self, plan: DemoPlan, console: Console) -> None:
        self.plan, self.console = plan, console
        self._overrides = ["--train.steps", str(plan.steps)]
        self._overrides += without_library(read_config(plan.config))
        self.config = read_config(plan.config, self._overrides)
        self.layout = resolve_layout(self.config, RANKS)
        # The id depends on the folder: demos in two clones do not collide in shared memory.
        mark = hashlib.blake2b(str(plan.folder.resolve()).encode(), digest_size=4).hexdigest()
        self.unbroken = self._run("unbroken run", "unbroken", f"demo-{mark}-unbroken")
        self.crash = self._run("run that is killed", "crash", f"demo-{mark}-crash")

    def _run(self, name: str, folder: str, job: str) -> DemoRun:
        place = self.plan.folder / folder
        return DemoRun(
            name=name, folder=place, root=place / "checkpoints", job=job, config=self.plan.config, ranks=RANKS,
            overrides=self._overrides,
        )  # fmt: skip

    def run(self) -> int:
        """Do all of it; return 0 if both traces are identical and the model says something, else 1."""
        self._clean()
        try:
            return self._tell_all()
        except BaseException:  # interrupted or failed: nothing of a demo is worth keeping in memory
            for run in (self.unbroken, self.crash):
                with contextlib.suppress(JobInUseError):
                    forget_job(run.job)
            raise

    def _tell_all(self) -> int:
        began = time.monotonic()
        self._introduce()
        self._part("1/3  the unbroken run")
        with self._progress(self.unbroken) as progress, self.unbroken.running() as run:
            run.wait_end(progress.update)
        self._part(
            f"2/3  the same run; rank {self.plan.kill_rank} gets SIGKILL in the middle of step {self.plan.kill_after + 1}"
        )
        with self._progress(self.crash) as progress, self.crash.running() as run:
            first = self._kill(run, progress)
            run.wait_step(self.plan.lose_after, progress.update)
            self._wait_durable(run)
            lost = run.lose_machine()
        after = int(self.crash.trace()[-1]["step"])
        self._tell_recovery(first)
        self._part(
            f"3/3  the machine is lost after step {after}: all processes killed, {lost / 1e6:.1f} MB of shared memory deleted"
        )
        with self._progress(self.crash) as progress, self.crash.running() as run:
            second = self._recovered(run, progress, after, time.time(), len(read_restores(run.folder)))
            run.wait_end(progress.update)
        return self._conclude(first, second, began)

    def _clean(self) -> None:
        for run in (self.unbroken, self.crash):
            forget_job(run.job)
        shutil.rmtree(self.plan.folder, ignore_errors=True)
        self.plan.folder.mkdir(parents=True)

    def _introduce(self) -> None:
        say = self.console.print
        text = prepare_text(self.config)
        settings = self.config.checkpoint
        say("[bold]flashckpt demo[/bold]: kill a worker, lose nothing")
        say(f"  model    Llama-like, {self.config.model.layers} layers, on real text: {text}")
        say(f"  layout   {RANKS} ranks on CPU: {self.layout.describe()}")
        say(
            f"  keeping  a snapshot in shared memory every {settings.snapshot_every} steps, "
            f"a checkpoint on disk every {settings.persist_every}"
        )
        say(f"  files    {self.plan.folder}")

    def _part(self, text: str) -> None:
        self.console.print(f"\n[bold]{text}[/bold]")

    def _progress(self, run: DemoRun) -> Progress:
        return Progress(self.console, steps=self.plan.steps, name=run.name)

    def _kill(self, run: DemoRun, progress: Progress) -> Crash:
        line = run.wait_step(self.plan.kill_after, progress.update)
        time.sleep(0.4 * float(line["seconds"]))  # the middle of the next step
        after, restores = run.trace()[-1]["step"], len(read_restores(run.folder))
        killed = run.kill_rank(self.plan.kill_rank)
        progress.note(f"SIGKILL to rank {self.plan.kill_rank} in step {after + 1}")
        return self._recovered(run, progress, after, killed, restores)

    def _recovered(self, run: DemoRun, progress: Progress, after: int, since: float, restores: int) -> Crash:
        """Wait for the first trained step of the next generation; `restores`: how many restores came before."""
        run.wait(lambda: len(read_restores(run.folder)) > restores, lambda _: None, "a restore")
        restored = read_restores(run.folder)[restores].step
        line = run.wait_step(restored + 1, progress.update, since=since)
        seconds = float(line["time"]) - since
        what = read_restores(run.folder)[restores]  # all ranks have reported by now
        progress.note(f"back at step {restored} with {what.text()}; next step trained {seconds:.2f} s after")
        return Crash(after=after, restored=restored, seconds=seconds)

    def _wait_durable(self, run: DemoRun) -> None:
        end = time.monotonic() + STALE_S
        while not list(run.root.glob("*/MANIFEST")):
            if time.monotonic() > end:
                raise FlashckptError(
                    "no checkpoint was committed",
                    found=f"none in {run.root} after {STALE_S:.0f} s",
                    expected="one at least",
                )
            time.sleep(0.05)

    def _tell_recovery(self, crash: Crash) -> None:
        failures = ledger.read(self.crash.ledger) if self.crash.ledger.exists() else []
        restores = read_restores(self.crash.folder)
        failure: dict[str, Any] = failures[0] if failures else {}
        self.console.print()
        self.console.print(recovery_table(failure.get("seconds", {}), crash.seconds))
        for fact in recovery_facts(failure, restores[0] if restores else None, crash.after - crash.restored):
            self.console.print(f"  {fact}")

    def _conclude(self, first: Crash, second: Crash, began: float) -> int:
        say = self.console.print
        restores = read_restores(self.crash.folder)
        for fact in recovery_facts({}, restores[-1] if restores else None, second.after - second.restored):
            say(f"  {fact}")
        say(f"  seconds    {second.seconds:.2f} from the start of dlrun to the next trained step")
        result = compare_traces(self.unbroken.trace(), self.crash.trace(), self.plan.steps)
        picture = self.plan.folder / "loss.png"
        marks = [
            (first.after, first.restored, f"SIGKILL of rank {self.plan.kill_rank}"),
            (second.after, second.restored, "machine lost"),
        ]
        drawn = importlib.util.find_spec("matplotlib") is not None
        if drawn:
            draw(self.plan.folder, picture, marks)
        self._part("The result")
        self._verdict(result)
        say(f"  picture  {picture if drawn else 'none: matplotlib is not installed (it comes with the extra trainer)'}")
        say(f"  traces   {self.unbroken.folder / 'trace.jsonl'}  {self.crash.folder / 'trace.jsonl'}")
        self._leftovers()
        talks, text = say_words(self.crash.root)
        self.console.print("  says     " if talks else "  [bold red]generate failed[/bold red]: ", end="")
        self.console.print(text, markup=False)
        say(f"  time     {time.monotonic() - began:.0f} s")
        return 0 if result.identical and talks else 1

    def _verdict(self, result: Comparison) -> None:
        if result.identical:
            self.console.print(
                f"  [bold green]identical[/bold green]: all {result.steps} steps are those of the unbroken run, bit for bit"
            )
            self.console.print("  (loss and gradient norm compared as float.hex(), samples by their digest)")
        else:
            self.console.print(
                f"  [bold red]different[/bold red]: {result.equal} of {result.steps} steps agree; first difference: {result.first}"
            )

    def _leftovers(self) -> None:
        """Wait until the daemons have removed the memory of the ended jobs, and report it."""
        from flashckpt.shm.job_directory import memory_root

        jobs = [memory_root() / run.job for run in (self.unbroken, self.crash)]
        end = time.monotonic() + STALE_S
        while any(job.exists() for job in jobs) and time.monotonic() < end:
            time.sleep(0.05)
        left = [str(job) for job in jobs if job.exists()]
        self.console.print(
            f"  memory   {'still there: ' + ', '.join(left) if left else 'nothing is left in shared memory'}"
        )


_PATH = click.Path(path_type=Path)
_COMMAND = click.Command(
    "demo",
    help=(__doc__ or "").splitlines()[0],
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
    params=[
        click.Option(["--folder"], type=_PATH, default=Path("out/demo"), help="folder of all output; emptied first"),
        click.Option(["--config"], type=_PATH, default=DEFAULT_CONFIG, help="the run, on 8 ranks"),
        click.Option(["--steps"], type=int, default=40, help="steps of the run"),
        click.Option(["--kill-after"], type=int, default=28, help="SIGKILL in the middle of the step after"),
        click.Option(["--kill-rank"], type=int, default=5, help="which rank"),
        click.Option(["--lose-after"], type=int, default=34, help="lose the machine after this step"),
    ],
)


def read_plan(words: Sequence[str]) -> DemoPlan:
    """Return the plan of a command line.

    Raises:
        ConfigError: the crashes are not in order inside the run.
    """
    try:
        args = SimpleNamespace(**_COMMAND.make_context("python -m flashckpt.trainer.demo", list(words)).params)
    except click.exceptions.Exit as done:  # after --help
        raise SystemExit(done.exit_code) from None
    except click.ClickException as error:
        error.show()
        raise SystemExit(error.exit_code) from None
    config: RunConfig = read_config(args.config)
    least = config.checkpoint.snapshot_every
    if not least < args.kill_after < args.lose_after < args.steps or not 0 <= args.kill_rank < RANKS:
        raise ConfigError(
            "the demo's crashes do not fit into its run",
            found=f"--kill-after {args.kill_after} --lose-after {args.lose_after} --steps {args.steps} --kill-rank {args.kill_rank}",
            expected=f"{least} < kill-after < lose-after < steps, and a rank from 0 to {RANKS - 1}",
        )
    return DemoPlan(
        folder=args.folder, config=args.config, steps=args.steps, kill_after=args.kill_after,
        kill_rank=args.kill_rank, lose_after=args.lose_after,
    )  # fmt: skip


def main(words: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit code."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    try:
        return Demo(read_plan(sys.argv[1:] if words is None else words), console).run()
    except FlashckptError as error:
        console.print(f"[bold red]{type(error).__name__}[/bold red]: ", end="")
        console.print(str(error), markup=False)
        return error.exit_code
    except KeyboardInterrupt:
        console.print("\nstopped; nothing is left running")
        return 130


if __name__ == "__main__":
    sys.exit(main())
