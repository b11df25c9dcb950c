"""What dlrun and its ranks wait for, and for how long: storage that comes back, processes that are stopped or hang."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from support.dlrun import dlrun, run_dlrun
from support.proxy import Proxy
from support.s3 import moto_server

from flashckpt.errors import RootError

pytestmark = pytest.mark.timeout(300)

ON_S3 = """
import json, sys, torch, torch.distributed as dist
from flashckpt import Checkpointer
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(3, 3)
optimizer = torch.optim.AdamW(model.parameters())
ckpt = Checkpointer(f"s3://{sys.argv[1]}/run", persist_every=2, snapshot_every=1, storage_options=json.loads(sys.argv[2]))
ckpt.track(model=model, optimizer=optimizer, replicated_over="world")
report = ckpt.restore()
for step in range((report.step if report else 0) + 1, int(sys.argv[3]) + 1):
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    ckpt.step(step)
ckpt.wait()
ckpt.close()
print("from", report.step if report else None)
"""


def test_storage_that_comes_back_is_waited_for_and_a_bucket_that_is_not_there_is_not(tmp_path: Path) -> None:
    """A start after all memory was lost, while nobody listens at the endpoint, restores what is on it."""
    script = tmp_path / "train.py"
    script.write_text(ON_S3)
    flags = ("--nproc-per-node=2", "--max-restarts=0", script)
    with moto_server() as server, Proxy(server.endpoint) as proxy:
        options = json.dumps(server.options(retries=1, endpoint_url=proxy.endpoint))
        code, output = run_dlrun(tmp_path, *flags, "no-such-bucket", options, 2)
        assert (code, output.count("started rank 0")) == (RootError.exit_code, 1), output
        assert "trying again" not in output
        code, output = run_dlrun(tmp_path, *flags, server.bucket, options, 2)
        assert code == 0, output
        proxy.stop()
        memory = {"FLASHCKPT_SHM_DIR": str(tmp_path / "another-machine")}
        with dlrun(tmp_path, *flags, server.bucket, options, 4, env=memory) as launch:
            launch.until(partial(launch.says, "storage cannot be reached, trying again"), "the wait")
            proxy.start()
            assert launch.wait() == 0, launch.output
        assert launch.says("from 2")


EARLY = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(100):
    dist.all_reduce(torch.ones(1))
    if step == 20 and dist.get_rank() == 1:
        os._exit(0)
"""


def test_a_rank_that_leaves_with_0_is_named_and_not_those_that_missed_it(tmp_path: Path) -> None:
    (tmp_path / "early.py").write_text(EARLY)
    code, output = run_dlrun(tmp_path, "--nproc-per-node=3", "--max-restarts=0", tmp_path / "early.py")
    assert code == 1, output
    assert "rank 1 (local 1, pid" in output
    assert "failed first: it ended with exit code 0 while its peers still needed it" in output


@pytest.mark.parametrize(
    ("words", "starts"),
    [(["nope.py"], 0), (["-m", "nope"], 0), (["args.py", "--unknown"], 1), (["--no-python", "./missing"], 0)],
)
def test_a_wrong_command_line_ends_at_once(tmp_path: Path, words: list[str], starts: int) -> None:
    (tmp_path / "args.py").write_text("import argparse; argparse.ArgumentParser().parse_args()")
    code, output = run_dlrun(tmp_path, "--nproc-per-node=2", *words)
    assert (code, output.count("started rank 0")) == (2, starts), output
