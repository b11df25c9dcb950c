"""Groups that are separate runs, a node each (make test-nodes; root): one is switched off, the others go on, it is taken in again."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from support.nodes import Nodes, nodes
from support.training import write_corpus

from flashckpt.errors import RESUME_EXIT_CODE
from flashckpt.storage.posix import PosixStore
from flashckpt.trainer.config import read_config
from flashckpt.trainer.separate_runs.roster import Roster, Synchronisations
from flashckpt.trainer.train import loop
from flashckpt.trainer.train.metrics import read_trace

pytestmark = [pytest.mark.timeout(900), pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")]

GROUPS, EVERY, VICTIM = 3, 4, 2


def write_run(folder: Path, patience_s: float) -> Path:
    folder.mkdir()
    path = folder / "run.toml"
    path.write_text(
        "[model]\ndim = 32\nlayers = 2\nheads = 2\nkv_heads = 2\nffn = 64\n"
        f"[parallel]\nsync_every = {EVERY}\ngroups = {GROUPS}\nsync_wait_s = {patience_s}\n"
        f"[train]\nsteps = 100000\nseq_len = 16\nglobal_batch = {4 * GROUPS}\nmicro_batch = 4\n"
        'device = "cpu"\n'
        '[optim]\nlr = 1e-2\nwarmup_steps = 0\nschedule = "constant"\n'
        f'[data]\nsource = {write_corpus(folder / "text")}\nfolder = "{folder}/tokens"\n'
        f'[checkpoint]\nroot = "{folder}/root"\nsnapshot_every = 2\npersist_every = 4\n'
        f'[log]\nfolder = "{folder}/log"\nevery = 1000\n'
    )
    run = read_config(path)
    loop.prepare(replace(run, parallel=replace(run.parallel, groups=0, sync_every=0)), 1)
    return path


def start(them: Nodes, group: int, config: Path) -> None:
    words = ("--nproc-per-node=1", "-m", "flashckpt.trainer", "--config", config, "--parallel.group", group)
    them.run(group, "flashckpt.daemon.run", *words, "--parallel.sync_address", them.address(group))


def rosters(folder: Path) -> list[Roster]:
    """Return those of all synchronisations that took place, in their order."""
    found = Synchronisations(PosixStore(folder / "root" / "synchronisations"), GROUPS, 0.0)
    return [roster for number in range(found.newest() + 1) if (roster := found.roster(number)) is not None]


def losses(folder: Path, group: int) -> list[float]:
    """Return the losses of a group, which has trained each step once."""
    trace = read_trace(folder / "log" / f"group{group}" / "trace.jsonl")
    assert [line["step"] for line in trace] == [*range(1, len(trace) + 1)]
    return [float.fromhex(line["loss"]) for line in trace]


def trained(them: Nodes, folder: Path, step: int) -> None:
    them.until(lambda: rosters(folder)[-1].step >= step, f"a synchronisation at step {step}", 300)


def stop(them: Nodes) -> None:
    for process in them.processes.values():
        process.send_signal(signal.SIGTERM)
    assert {them.wait(node) for node in range(GROUPS)} == {RESUME_EXIT_CODE}, them.log(0)


def check_counted_once(found: list[Roster]) -> None:
    """No share of the samples counts twice, and none is forgotten."""
    counted = [found[roster.base].share_of(group) for roster in found[1:] for group in roster.gave]
    last = found[-1]
    assert len(counted) == len({*counted})
    assert {*counted} | {*last.owed} | {*last.shares} == {*range(last.unused)}


def test_group_whose_node_dies_is_left_out_and_taken_in_again_beside_the_losses_of_the_unbroken_run(
    tmp_path: Path,
) -> None:
    broken, unbroken = tmp_path / "broken", tmp_path / "unbroken"
    config = write_run(broken, 15.0)
    with nodes(tmp_path, GROUPS) as them:
        for group in range(GROUPS):
            start(them, group, config)
        trained(them, broken, 2 * EVERY)
        them.kill(VICTIM)
        met = rosters(broken)[-1].step
        them.until(lambda: rosters(broken)[-1].gave == (0, 1), "a synchronisation without it", 300)
        start(them, VICTIM, config)  # its memory is gone: it begins again from storage
        again = them.until(
            lambda: next((one for one in rosters(broken) if one.step > met and one.groups != one.gave), None),
            "it to be taken in",
            300,
        )
        trained(them, broken, again.step + 3 * EVERY)
        stop(them)
    found = rosters(broken)
    check_counted_once(found)
    assert (again.groups, again.gave) == ((0, 1, 2), (0, 1))
    assert found[-1].gave == (0, 1, 2), "it trains with them again"
    config = write_run(unbroken, 100.0)
    with nodes(tmp_path, GROUPS) as them:
        for group in range(GROUPS):
            start(them, group, config)
        trained(them, unbroken, found[-1].step)
        stop(them)
    assert all(roster.gave == (0, 1, 2) for roster in rosters(unbroken))
    for group in range(GROUPS - 1):
        mine, wanted = losses(broken, group), losses(unbroken, group)
        assert mine[:met] == wanted[:met], "nothing was lost yet"
        steps = min(len(mine), len(wanted))
        assert steps >= again.step + 2 * EVERY
        last = slice(steps - 8, steps)
        assert abs(sum(mine[last]) - sum(wanted[last])) / 8 < 0.3, (mine, wanted)
        print(f"group {group}: {sum(mine[last]) / 8:.3f} nats beside {sum(wanted[last]) / 8:.3f} at step {steps}")
