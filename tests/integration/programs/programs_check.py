"""`flashckpt check` on scripts with one fault each, which it has to name, and on exact ones.

The processes of the three runs are forks of an interpreter that has torch.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support import warm
from support.dlrun import processes_of

from flashckpt.cli.main import main
from flashckpt.exactness import runs

pytestmark = pytest.mark.timeout(600)
PLAIN = """
import random
import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset
from flashckpt import Checkpointer
from flashckpt.sampler import ElasticSampler

torch.manual_seed(1)
random.seed(1)
np.random.seed(1)
data = TensorDataset(torch.randn(24, 4), torch.randn(24, 2))
sampler = ElasticSampler(data, dp_rank=0, dp_size=1, global_batch_size=4, seed=3)
loader = DataLoader(data, batch_size=4, sampler=sampler)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
# setup
ckpt = Checkpointer("/nowhere/run", snapshot_every=5, persist_every=100)
ckpt.track(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler, rng=True)
report = ckpt.restore()
step = report.step if report else 0
for epoch in sampler.epochs(10):
    for x, y in loader:
        # before
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        # after
        step += 1
        ckpt.step(step)
ckpt.wait()
ckpt.close()
"""
SHUFFLED = """
import random
import torch
from flashckpt import Checkpointer

torch.manual_seed(1)
random.seed(1)
data = [torch.full((4,), float(i)) for i in range(6)]
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
ckpt = Checkpointer("/nowhere/run")
ckpt.track(model=model, optimizer=optimizer, rng=True)
report = ckpt.restore()
step = report.step if report else 0
for epoch in range(10):
    random.shuffle(data)
    for x in data:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        ckpt.step(step)
"""
CLOSURE = """
def warmup():
    count = 0

    def tick():
        nonlocal count
        count += 1
        return count / 10

    return tick

tick = warmup()
"""
EMA = "ema = {name: p.detach().clone() for name, p in model.named_parameters()}"
AVERAGE = "for name, p in model.named_parameters(): ema[name].lerp_(p.detach(), 0.1)"
AVERAGED = "average = torch.optim.swa_utils.AveragedModel(model)"
OWN = """
class Noise(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x):
        return x + torch.rand(x.shape, generator=self.generator)

model.append(Noise())
"""
ENVIRONMENT = """
class Environment:
    def __init__(self):
        self.place = torch.zeros(4)

    def step(self):
        self.place = self.place * 0.9 + 0.1
        return self.place

env = Environment()
"""
ORDER = """
class Order(torch.utils.data.Sampler):
    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < 24:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]

"""
DRAWN = """class Drawn(TensorDataset):
    def __getitem__(self, i):
        return [one + torch.rand(()) for one in super().__getitem__(i)]

data = Drawn(torch.randn(24, 4), torch.randn(24, 2))
unused = Ten"""
STEP, SCALED = (
    "loss.backward()\n        optimizer.step()",
    "scaler.scale(loss).backward()\n        scaler.step(optimizer)\n        scaler.update()",
)
SCALER = 'scaler = torch.amp.GradScaler("cpu", growth_interval=3)'

FAULTS: dict[str, tuple[dict[str, str], str, str]] = {
    "numpy": ({"rng=True": "rng=False", "# before": "x = x + torch.from_numpy(np.random.rand(4, 4)).float()",
               "Dropout(0.5)": "ReLU()"}, "generator", "numpy's generator differs after the restore: it is not tracked"),
    "own numpy generator": ({"# setup": "noise = np.random.default_rng(4)", "# before": "x = x + float(noise.random())"},
                            "generator", "the generator noise is not restored"),
    "scheduler": ({"scheduler=scheduler, ": ""}, "object", "scheduler (StepLR) is not restored"),
    "order": ({"sampler=sampler, rng": "rng", "sampler=sampler)": ")", "sampler.epochs(10)": "range(10)"},
              "data", "step 6 is given what step 1 is given a second time"),
    "average of weights": ({"# setup": EMA, "# after": AVERAGE}, "tensor", "the tensor ema['0.weight'] (float32[8, 4])"),
    "averaged model": ({"# setup": AVERAGED, "# after": "average.update_parameters(model)"},
                       "object", "average (AveragedModel) is not restored"),
    "generator of a layer": ({"# setup": OWN}, "generator", "the generator model.3.generator is not restored"),
    "scaler": ({"# setup": SCALER, STEP: SCALED}, "object", "scaler (GradScaler) is not restored"),
    "a closure": ({"# setup": CLOSURE, "# before": "optimizer.param_groups[0]['weight_decay'] = tick()"},
                  "value", "count of tick() is 1 and was 6"),
    "gradients": ({"        optimizer.zero_grad()\n": "", "        optimizer.step()\n": "        if step % 3 == 2:\n"
                   "            optimizer.step()\n            optimizer.zero_grad()\n"},
                  "gradient", "step 6 begins with gradients of 'model' from before it"),
    "gradients beside a count": (
        {"# setup": "micro = 0", "        optimizer.zero_grad()\n": "", "        optimizer.step()\n": "        micro += 1\n"
         "        if micro % 3 == 0:\n            optimizer.step()\n            optimizer.zero_grad()\n"},
        "gradient", "step 6 begins with gradients of 'model' from before it"),
    "a sampler of their own": (
        {"sampler=sampler, rng": "rng", "sampler=sampler)\nmodel": "sampler=order)\nmodel",
         "sampler = Elastic": ORDER + "order = Order()\nsampler = Elastic", "sampler.epochs(10)": "range(10)"},
        "object", "order (Order) is not restored: order.at differs"),
    "dropout that grows": ({"# after": "model[1].p *= 0.9"}, "value", "model.1.p is 0.5 and was 0.2"),
    "an environment": ({"# setup": ENVIRONMENT, "# before": "x = x + env.step()"}, "tensor", "the tensor env.place"),
    "a list of tensors": ({"# setup": "seen = []", "# before": "x = x + sum(seen)", "# after": "seen.append(x.mean(0))"},
                          "value", "len(seen) is 0 and was 5"),
    "samples drawn in workers": ({"data = Ten": DRAWN, "sampler=sampler)\nmodel": "sampler=sampler, num_workers=1)\nmodel"},
                                 "data", "step 6 is given other data"),
    "a second optimizer": (
        {"# setup": "extra = torch.nn.Linear(2, 2)\nother = torch.optim.Adam(extra.parameters())\n",
         "sampler=sampler, rng": "sampler=sampler, extra=extra, rng", "(model(x) - y)": "(extra(model(x)) - y)",
         "scheduler.step()": "scheduler.step(); other.step(); other.zero_grad()"},
        "object", "other (Adam) is not restored"),
    "a compiled model": ({"# setup": "net = torch.compile(model, backend='eager')\nheat = torch.ones(2)",
                          "(model(x) - y)": "(net(x) * heat - y)", "# after": "heat = heat * 0.9"},
                         "tensor", "the tensor heat (float32[2]) is not restored"),
    "a layer that thaws": ({"# setup": "model[0].requires_grad_(False)", "# before": "model[0].requires_grad_(step > 2 and bool(seen))",
                            "step = report": "seen = []; step = report", "# after": "seen.append(1)"},
                           "value", "frozen parameters of model is ['0.weight', '0.bias'] and was []"),
    "weights made after it": ({"step = report": "model[0].reset_parameters(); step = report"},
                              "changed", "'model' (Sequential) is changed between restore() and the first step"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(runs, "start", warm.start)


def checked(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any]]:
    """Check a script; return exit code and document. Nothing may be left of it."""
    script = tmp_path / "train.py"
    script.write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["check", "--json", *options, str(script)])
    assert not processes_of(tmp_path)
    left = [path for path in Path(os.environ["FLASHCKPT_SHM_DIR"]).rglob("*") if "flashckpt-bench" in path.name]
    assert not left
    return int(ended.value.code or 0), json.loads(capsys.readouterr().out)


def changed(text: str, changes: dict[str, str]) -> str:
    """Return a script with one fault."""
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    return text


def test_an_exact_script_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, document = checked(tmp_path, PLAIN, capsys)
    assert (code, document["verdict"], document["causes"]) == (0, "exact", [])
    assert document["restored_step"] in (4, 5)


TRAINER = """
import random
import time
import torch
from torch.utils.data import DataLoader
from flashckpt import Checkpointer
from flashckpt.sampler import ElasticSampler


class Progress:
    def __init__(self):
        self.step, self.began, self.best = 0, time.time(), None


class Trainer:
    def __init__(self, model, data):
        self.model, self.data, self.progress, self.callbacks = model, data, Progress(), [print]
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.2, 50)
        self.average = torch.optim.swa_utils.AveragedModel(model)
        self.sampler = ElasticSampler(data, dp_rank=0, dp_size=1, global_batch_size=8, seed=3)

    def train_step(self, batch):
        for half in batch.chunk(2):
            loss = self.model(half + random.random()).square().mean() / 2
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.average.update_parameters(self.model)
        return loss

    def train(self):
        self.ckpt = Checkpointer("/nowhere/run", snapshot_every=5, persist_every=100)
        self.ckpt.track(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, average=self.average,
                        sampler=self.sampler, rng=True)
        report = self.ckpt.restore()
        self.progress.step = report.step if report else 0
        loader = DataLoader(self.data, batch_size=8, sampler=self.sampler, num_workers=1)
        for epoch in self.sampler.epochs(20):
            for batch in loader:
                loss = self.train_step(batch)
                self.progress.step += 1
                self.ckpt.step(self.progress.step)
        self.ckpt.close()


torch.manual_seed(1)
random.seed(1)
Trainer(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.2)), torch.randn(40, 4)).train()
"""


def test_an_exact_class_that_trains_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With accumulation, an average of weights, a worker of the loader, a clock, and numbers in objects."""
    code, document = checked(tmp_path, TRAINER, capsys)
    assert (code, document["verdict"], document["causes"], document["hints"]) == (0, "exact", [], []), document


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes, kind, words = FAULTS[fault]
    code, document = checked(tmp_path, changed(PLAIN, changes), capsys)
    assert (code, document["verdict"]) == (1, "not exact"), document
    named = document["hints"] if kind == "value" else document["causes"]
    assert any(words in cause["what"] and cause["kind"] == kind for cause in named), document


def test_of_a_model_whose_methods_are_called_the_cause_is_named_without_its_consequences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = changed(PLAIN, {"loss = (model(x) - y)": "loss = (model[0](x).sum() * heat - y)", "# setup": "heat = torch.ones(2)",
                           "# after": "heat = heat * 0.9"})  # fmt: skip
    code, document = checked(tmp_path, text, capsys)
    assert (code, [cause["name"] for cause in document["causes"]]) == (1, ["heat"]), document


def test_a_list_that_is_shuffled_again_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, document = checked(tmp_path, SHUFFLED, capsys)
    assert code == 1
    sentences = "\n".join(cause["what"] for cause in document["causes"])
    assert "Python's generator differs at the first step after the restore" in sentences
    assert "step 6 is given" in sentences


NOT_JUDGED = {
    "no Checkpointer": ("import torch\nprint(torch.ones(1))\n", "the script makes no Checkpointer"),
    "no step": (SHUFFLED.replace("        ckpt.step(step)", ""), "the script takes no step"),
    "a sampler forgotten": (PLAIN.replace("sampler=sampler, rng", "rng"), "the script fails without a kill"),
    "an early end": (PLAIN.replace("epochs(10)", "epochs(1)"), "the script ends before the kill"),
    "an error": (PLAIN.replace("# setup", "raise ValueError('no such file')"), "the script fails without a kill"),
    "another order": (
        PLAIN.replace("sampler=sampler)\nmodel", "shuffle=True)\nmodel"),
        "the script fails without a kill",
    ),
}


@pytest.mark.parametrize("case", NOT_JUDGED)
def test_what_cannot_be_judged_says_why(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, problem = NOT_JUDGED[case]
    code, document = checked(tmp_path, text, capsys, "--kill-after", "7", "--steps", "9")
    assert (code, document["error"]["problem"]) == (2, problem)
    found = {
        "an error": "no such file",
        "another order": "SamplerStateError",
        "a sampler forgotten": "SamplerStateError",
    }.get(case, "")
    assert found in document["error"]["found"]


def test_a_script_that_is_not_deterministic_is_called_that(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = changed(
        PLAIN, {"np.random.seed(1)": "", "# before": "x = x + torch.from_numpy(np.random.rand(4, 4)).float()"}
    )
    code, document = checked(tmp_path, text, capsys)
    assert (code, document["verdict"], document["first_step"]) == (1, "not deterministic", 1)
    assert document["causes"][0]["what"] == "numpy's generator differs between two unbroken runs"


SHARDED = """
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from flashckpt import Checkpointer
from flashckpt.sampler import ElasticSampler


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(48, 4))
    sampler = ElasticSampler(data, dp_rank=dist.get_rank(), dp_size=2, global_batch_size=8, seed=3)
    loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ckpt = Checkpointer("/nowhere/run", snapshot_every=5, persist_every=100)
    ckpt.track(model=model, optimizer=optimizer, sampler=sampler, rng=True)
    report = ckpt.restore()
    step = report.step if report else 0
    total = 0.0
    for epoch in sampler.epochs(10):
        for (x,) in loader:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item()
            step += 1
            ckpt.step(step)


main()
"""


def test_under_dlrun_two_sharded_ranks_are_exact_and_a_sum_of_losses_is_only_mentioned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, document = checked(tmp_path, SHARDED, capsys, "--nproc-per-node", "2")
    assert (code, document["verdict"], document["causes"]) == (0, "exact", []), document
    assert [hint["name"] for hint in document["hints"]] == ["main(): total"]


def test_a_script_that_hangs_is_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = PLAIN.replace("# before", "import signal; step < 2 or signal.pause()")
    code, document = checked(tmp_path, text, capsys, "--timeout", "8s")
    assert (code, document["error"]["problem"]) == (2, "the script took too long")
