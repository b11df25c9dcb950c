"""The programs: where each lies in its sources, what it is started with, what makes it small, and what it needs.

Not among them: torchtune 0.6.1, whose import fails beside torchao 0.18 (it has no torchao.dtypes.nf4tensor); mosaicml's composer
0.32.1, which asks for a torch below 2.7.1; litgpt 0.5.13, whose training is a command of its package and no script.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Program:
    """One program of others.

    Attributes:
        name: Of its diff, `diffs/NAME.diff`.
        script: Within SOURCES: repository and path.
        arguments: Of the script; {data} is the folder of the data.
        data: The function of `data` that makes them.
        imports: Folders of SOURCES that have to be on the path.
        needs: Packages it imports beside them.
        smaller: Texts of the script that another stands for, before the diff: sizes, weights from a hub, devices.
        root: Of its checkpoints, from the folder of the script.
        kills: After how many optimizer steps of its own each life ends.
        ranks: Started by dlrun; 0: as plain Python.
        same_order: Whether the diff leaves the order of the data as it was: then the program without it has the same trace.
        unlike: Names of objects whose values differ between two runs that are equal: clocks in a pickled environment.
        checked: Arguments for `flashckpt check`.
    """

    name: str
    script: str
    arguments: str = ""
    data: str = "none"
    imports: Sequence[str] = ()
    needs: Sequence[str] = ()
    smaller: Mapping[str, str] = field(default_factory=dict)
    root: str = "checkpoints"
    kills: Sequence[int] = (12, 14)
    ranks: int = 1
    same_order: bool = False
    unlike: Sequence[str] = ()
    checked: Sequence[str] = ()


_ON_CPU = {
    'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))': "pass",
    'backend="nccl"': 'backend="gloo"',
    "model.to(self.gpu_id)": "model",
    "device_ids=[self.gpu_id]": "",
    "source.to(self.gpu_id)": "source",
    "targets.to(self.gpu_id)": "targets",
    "F.cross_entropy": "F.mse_loss",  # of one class it is always 0, and nothing is trained
}

PROGRAMS = [
    Program(
        name="nanogpt",
        script="nanoGPT/train.py",
        arguments="--dataset=tokens --device=cpu --compile=False --dtype=float32 --eval_iters=2 --eval_interval=10"
        " --block_size=32 --batch_size=4 --n_layer=2 --n_head=2 --n_embd=32 --dropout=0.2 --max_iters=40"
        " --lr_decay_iters=40 --warmup_iters=5 --gradient_accumulation_steps=2 --out_dir=out",
        data="tokens",
        root="out/checkpoints",
        ranks=0,
        same_order=True,
    ),
    Program(
        name="imagenet",
        script="examples/imagenet/main.py",
        arguments="{data}/pictures -a resnet18 -b 4 -j 2 --epochs 3 --seed 3 --no-accel -p 5",
        data="pictures",
        needs=("torchvision",),
        kills=(7, 9),
    ),
    Program(
        name="ddp",
        script="examples/distributed/ddp-tutorial-series/multigpu_torchrun.py",
        arguments="3 1 --batch_size 64",
        smaller=_ON_CPU,
        ranks=2,
        unlike=("rng",),  # it makes an iterator for one batch and leaves it: each draws a seed (docs/data.md)
    ),
    Program(
        name="dcgan",
        script="examples/dcgan/main.py",
        arguments="--dataset fake --outf out --manualSeed 5 --ngf 8 --ndf 8 --niter 2",
        needs=("torchvision",),
        root="out/checkpoints",
        kills=(17, 20),
    ),
    Program(
        name="timm",
        script="pytorch-image-models/train.py",
        arguments="--data-dir {data}/pictures --train-split train --val-split val --model test_efficientnet"
        " --num-classes 4 --img-size 32 -b 4 --epochs 3 --opt adamw --lr 1e-3 --sched cosine --sched-on-updates"
        " --warmup-epochs 0 --model-ema --model-ema-decay 0.9 --mixup 0.2 --aa rand-m5 --reprob 0.3 --workers 1"
        " --no-prefetcher --device cpu --output out --log-interval 1",
        data="pictures",
        imports=("pytorch-image-models",),
        needs=("torchvision",),
        root="out/checkpoints",
        kills=(7, 9),
        checked=(
            "--ignore",
            "scheduler.metric",
        ),  # the mean loss since the epoch began, or the restart; of plateaus alone
    ),
    Program(
        name="diffusers",
        script="diffusers/examples/unconditional_image_generation/train_unconditional.py",
        arguments="--train_data_dir {data}/pictures/train --model_config_name_or_path {data}/unet --resolution 16"
        " --random_flip --train_batch_size 4 --num_epochs 4 --gradient_accumulation_steps 2 --use_ema"
        " --output_dir out --lr_warmup_steps 5 --ddpm_num_steps 50 --ddpm_num_inference_steps 2"
        " --save_images_epochs 1 --save_model_epochs 10 --eval_batch_size 2 --cache_dir {data}/cache",
        data="unet",
        imports=("diffusers/src",),
        needs=("torchvision", "accelerate", "datasets"),
        root="out/flashckpt",
        kills=(7, 8),
    ),
    Program(
        name="accelerate",
        script="accelerate/examples/complete_cv_example.py",
        arguments="--data_dir {data}/flat --cpu",
        data="pictures",
        imports=("accelerate/src", "pytorch-image-models"),
        needs=("torchvision",),
        smaller={
            '"resnet50d", pretrained=True': '"resnet10t", pretrained=False',
            '"batch_size": 64, "image_size": 224': '"batch_size": 4, "image_size": 32',
            "num_workers=4": "num_workers=1",
        },
        kills=(7, 9),
    ),
    Program(
        name="run-clm",
        script="transformers/examples/pytorch/language-modeling/run_clm.py",
        arguments="--model_type gpt2 --tokenizer_name {data}/tokenizer --train_file {data}/text.txt --do_train"
        " --config_overrides n_embd=32,n_layer=2,n_head=2,vocab_size=300 --block_size 32 --output_dir out"
        " --per_device_train_batch_size 4 --num_train_epochs 1 --max_steps 40 --save_strategy no --report_to none"
        " --use_cpu --logging_steps 1 --validation_split_percentage 10",
        data="text",
        needs=("transformers", "accelerate", "datasets"),
        root="out/checkpoints",
    ),
    Program(
        name="cleanrl-dqn",
        script="cleanrl/cleanrl/dqn.py",
        arguments="--total-timesteps 400 --learning-starts 40 --train-frequency 4 --target-network-frequency 20"
        " --batch-size 16 --buffer-size 300 --no-cuda",
        imports=("cleanrl",),
        needs=("gymnasium", "tyro"),
        kills=(25, 30),
        same_order=True,
        unlike=("game",),
        checked=("--steps", "70", "--kill-after", "50", "--ignore", "game*"),
    ),
    Program(
        name="cleanrl-ppo",
        script="cleanrl/cleanrl/ppo.py",
        arguments="--total-timesteps 2048 --num-steps 32 --no-cuda",
        needs=("gymnasium", "tyro"),
        kills=(40, 50),
        same_order=True,
        unlike=("game",),
        checked=("--ignore", "game*"),
    ),
    Program(
        name="pyg-gcn",
        script="pytorch_geometric/examples/gcn.py",
        arguments="--epochs 40",
        data="graph",
        imports=("pytorch_geometric",),
        same_order=True,
    ),
]
