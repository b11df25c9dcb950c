"""`flashckpt import` of what the frameworks themselves write, restored in their own objects (`make test-frameworks`)."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from unit.interop.test_interop import Captured, run, same

from flashckpt import Checkpointer

pytestmark = pytest.mark.filterwarnings("ignore")


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"needs {name} (make test-frameworks)")


def trainer(folder: Path, model: Any, **more: Any) -> Any:
    """Return a Trainer that saves at steps 2 and 4, with its optimizer and scheduler made."""
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(3)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 16, (16, 5))]
    arguments = TrainingArguments(
        str(folder), max_steps=4, save_steps=2, per_device_train_batch_size=2, use_cpu=True, report_to=[], weight_decay=0.1,
        learning_rate=0.01, warmup_steps=1, disable_tqdm=True, **more,
    )  # fmt: skip
    return Trainer(model, arguments, train_dataset=rows)


def llama(seed: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=3, num_attention_heads=2, tie_word_embeddings=True
        )
    )  # fmt: skip


def assert_restored(root: Path, saved: Any, fresh: Any) -> None:
    """Fill a Trainer that has not trained from `root`; it must be what the other one was."""
    fresh.create_optimizer_and_scheduler(num_training_steps=4)
    assert not fresh.optimizer.state
    ckpt = Checkpointer(str(root))
    ckpt.track(model=fresh.model, optimizer=fresh.optimizer, scheduler=fresh.lr_scheduler, rng=True)
    report = ckpt.restore()
    drawn = random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002 -- the generator that Trainer saves
    ckpt.close()
    assert report is not None
    assert report.step == 4
    assert same(dict(saved.model.state_dict()), dict(fresh.model.state_dict()))
    theirs = dict(fresh.model.named_parameters())
    for name, mine in saved.model.named_parameters():
        if mine.requires_grad:
            assert same(inner(saved.optimizer).state[mine], inner(fresh.optimizer).state[theirs[name]]), name
    assert inner(saved.optimizer).param_groups[0]["lr"] == inner(fresh.optimizer).param_groups[0]["lr"]
    assert saved.lr_scheduler.state_dict() == fresh.lr_scheduler.state_dict()
    folder = Path(saved.args.output_dir) / "checkpoint-4"
    saved._load_rng_state(str(folder))
    assert drawn == (random.random(), float(np.random.rand()), float(torch.rand(())))  # noqa: NPY002 -- as above


def inner(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)


@needs("transformers")
@pytest.mark.timeout(300)
def test_folder_of_a_trainer_restores_in_a_trainer(tmp_path: Path, capsys: Captured) -> None:
    saved = trainer(tmp_path / "out", llama(1))
    saved.train()
    root = tmp_path / "root"
    capsys.readouterr()  # what the framework printed
    code, document = run("import", tmp_path / "out" / "checkpoint-4", root, capsys=capsys)
    assert code == 0, document
    assert (document["format"], document["step"]) == ("trainer", 4)
    assert_restored(root, saved, trainer(tmp_path / "other", llama(2)))


@needs("peft")
@pytest.mark.timeout(300)
def test_folder_of_a_trainer_with_an_adapter_restores_the_adapter(tmp_path: Path, capsys: Captured) -> None:
    from peft import LoraConfig, get_peft_model

    def adapted(seed: int) -> Any:
        return get_peft_model(llama(seed), LoraConfig(target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"]))

    saved = trainer(tmp_path / "out", adapted(1))
    saved.train()
    names = tmp_path / "names.txt"
    by_id = {id(p): name for name, p in saved.model.named_parameters()}
    names.write_text("\n".join(by_id[id(p)] for group in saved.optimizer.param_groups for p in group["params"]))
    folder, root = tmp_path / "out" / "checkpoint-4", tmp_path / "root"
    capsys.readouterr()  # what the framework printed
    code, document = run("import", folder, root, "--parameters", names, capsys=capsys)
    assert code == 0, document
    fresh = trainer(tmp_path / "other", adapted(1))
    ckpt = Checkpointer(str(root))
    fresh.create_optimizer_and_scheduler(num_training_steps=4)
    ckpt.track(model=fresh.model, optimizer=fresh.optimizer, scheduler=fresh.lr_scheduler)
    report = ckpt.restore(strict=False)
    ckpt.close()
    assert report is not None
    theirs = dict(fresh.model.named_parameters())
    trained = [(name, mine) for name, mine in saved.model.named_parameters() if mine.requires_grad]
    assert any("lora_B" in name and mine.any() for name, mine in trained)
    for name, mine in trained:
        assert torch.equal(mine, theirs[name]), name
        assert same(inner(saved.optimizer).state[mine], inner(fresh.optimizer).state[theirs[name]]), name


@needs("lightning")
@pytest.mark.timeout(300)
def test_checkpoint_of_lightning_restores_in_a_module(tmp_path: Path, capsys: Captured) -> None:
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc]  # lightning is not there when types are checked
        def __init__(self, width: int = 6) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = torch.nn.Sequential(
                torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 6)
            )

        def training_step(self, batch: Any, _number: int) -> Any:
            return self.net(batch[0]).pow(2).mean()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    torch.manual_seed(1)
    module = Module()
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(12, 6)), batch_size=4)
    fit = lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, default_root_dir=tmp_path
    )  # fmt: skip
    fit.fit(module, data)
    fit.save_checkpoint(tmp_path / "last.ckpt")
    root = tmp_path / "root"
    capsys.readouterr()  # what the framework printed
    code, document = run("import", tmp_path / "last.ckpt", root, capsys=capsys)
    assert code == 0, document
    assert (document["format"], document["step"]) == ("lightning", 6)
    torch.manual_seed(2)
    other = Module()
    (optimizer,), (scheduler,) = other.configure_optimizers()
    ckpt = Checkpointer(str(root))
    ckpt.track(model=other, optimizer=optimizer, scheduler=scheduler)
    report = ckpt.restore()
    ckpt.close()
    assert report is not None
    assert report.step == 6
    assert same(dict(module.state_dict()), dict(other.state_dict()))
    own = fit.optimizers[0]
    for mine, theirs in zip(module.parameters(), other.parameters(), strict=True):
        assert same(own.state[mine], optimizer.state[theirs])
    assert scheduler.state_dict() == fit.lr_scheduler_configs[0].scheduler.state_dict()
