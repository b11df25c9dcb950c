"""The machine whose numbers alone become bad, twice: it leaves the job where another waits, or where --nnodes allows it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
from support.dlrun import Launch, dlrun
from support.s3 import free_port

from flashckpt.daemon.launcher.options import NodeCheckError

pytestmark = pytest.mark.timeout(300)

TRAIN = """
import math, os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from flashckpt import Checkpointer

folder = Path(sys.argv[1])
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(16, 16)
fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ckpt = Checkpointer(f"{folder}/root", snapshot_every=1, persist_every=5, keep_last=3)
ckpt.track(model=model, optimizer=optimizer)
report = ckpt.restore()
for step in range(report.step + 1 if report else 1, 41):
    loss = model(torch.ones(4, 16)).pow(2).mean()
    if not math.isfinite(loss.item()):
        raise FloatingPointError("the loss is bad")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mark = folder / f"bad-{step}"
    if "ODD" in os.environ and step in (12, 27) and not mark.exists():
        mark.touch()
        with torch.no_grad():
            model.weight.to_local()[0, 0] = math.nan
    ckpt.step(step)
    if step % 5 == 0:
        ckpt.wait()
    while os.environ.get("ODD") == "leaves" and step == 30:  # its agent is to leave
        with ckpt.paused():
            time.sleep(0.1)
print("finished on", dist.get_world_size(), flush=True)
"""


@pytest.mark.parametrize(
    ("nnodes", "count", "host"), [("2", 3, 0), ("1:2", 2, 0), ("1:2", 2, 1)], ids=["spare", "fewer", "rendezvous"]
)
def test_the_node_whose_numbers_alone_became_bad_twice_is_left_out(
    nnodes: str, count: int, host: int, tmp_path: Path
) -> None:
    """But for the one on which the rendezvous is: without it no other node could go on."""
    odd = "stays" if host == 1 else "leaves"
    (tmp_path / "train.py").write_text(TRAIN)
    where = [f"--nnodes={nnodes}", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=odd"]
    where += [f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--local-addr=127.0.0.1"]
    launches: list[Launch] = []
    with contextlib.ExitStack() as stack:

        def start(node: int) -> None:
            mine, memory = tmp_path / f"node{node}", Path(os.environ["FLASHCKPT_SHM_DIR"], f"{tmp_path.name}-{node}")
            for made in (mine, memory):
                made.mkdir()
            environment = {"FLASHCKPT_SHM_DIR": str(memory), **({"ODD": odd} if node == 1 else {})}
            words = [*where, f"--rdzv-conf=is_host={int(node == host)}", tmp_path / "train.py", tmp_path]
            launches.append(stack.enter_context(dlrun(mine, *words, env=environment)))

        start(0)
        start(1)
        for node in range(2, count):
            launches[1].until(lambda: "it stays until another node waits" in launches[1].output, "the second time")
            start(node)
        codes = [launch.wait() for launch in launches]
    bad = launches[1].output
    if odd == "stays":
        assert codes == [0, 0], bad
        assert "in steps 12, 27: test its hardware; it stays: the job's rendezvous is on it" in bad
        return
    assert codes == [0, NodeCheckError.exit_code, 0][:count], f"{bad}\n-- the first node: {launches[0].output}"
    assert "this node is left out: numbers became NaN or infinite on " in bad
    assert "in steps 12, 27" in bad
    assert f"finished on {2 if count == 3 else 1}" in launches[0].output
