"""Small data for the programs of others, made from a seed: tokens, pictures, a graph, text with its tokenizer."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

import numpy as np
import torch

VOCAB = 65


def tokens(folder: Path) -> None:
    """Write train.bin and val.bin as nanoGPT's character set has them, with the size of the vocabulary."""
    own = folder / "tokens"
    own.mkdir()
    rng = np.random.default_rng(1)
    for name in ("train", "val"):
        rng.integers(0, VOCAB, 4096).astype(np.uint16).tofile(own / f"{name}.bin")
    (own / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": VOCAB}))


def pictures(folder: Path) -> None:
    """Write 40 pictures of four classes and 8 to validate, by folder, and the same in one folder as CLASS_NUMBER.jpg."""
    from PIL import Image

    rng = np.random.default_rng(2)
    flat = folder / "flat"
    flat.mkdir()
    for split, count in (("train", 10), ("val", 2)):
        for label in ("cat", "cow", "dog", "hen"):
            own = folder / "pictures" / split / label
            own.mkdir(parents=True)
            for number in range(count):
                picture = Image.fromarray(rng.integers(0, 256, (40, 40, 3), dtype=np.uint8))
                picture.save(own / f"{number}.png")
                if split == "train":
                    picture.save(flat / f"{label}_{number}.jpg")


def unet(folder: Path) -> None:
    """Write pictures, and the configuration of a small denoiser for them."""
    pictures(folder)
    config = {
        "_class_name": "UNet2DModel",
        "sample_size": 16,
        "in_channels": 3,
        "out_channels": 3,
        "layers_per_block": 1,
        "block_out_channels": [8, 16],
        "down_block_types": ["DownBlock2D", "DownBlock2D"],
        "up_block_types": ["UpBlock2D", "UpBlock2D"],
        "norm_num_groups": 4,
        "dropout": 0.1,
    }
    (folder / "unet").mkdir()
    (folder / "unet" / "config.json").write_text(json.dumps(config))


def graph(folder: Path) -> None:
    """Write a graph of 200 nodes where PyTorch Geometric looks for one that is processed already."""
    from torch_geometric.data import Data, InMemoryDataset  # type: ignore[import-not-found]

    generator = torch.Generator().manual_seed(3)
    masks = {f"{name}_mask": torch.arange(200) % 3 == i for i, name in enumerate(("train", "val", "test"))}
    data = Data(
        x=torch.rand(200, 32, generator=generator),
        edge_index=torch.randint(0, 200, (2, 800), generator=generator),
        y=torch.randint(0, 5, (200,), generator=generator),
        **masks,
    )
    own = folder / "Planetoid" / "Cora"
    for name in ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index"):
        path = own / "raw" / f"ind.cora.{name}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (own / "processed").mkdir()
    InMemoryDataset.save([data], str(own / "processed" / "data.pt"))


def text(folder: Path) -> None:
    """Write text, and a tokenizer trained on it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    rng = np.random.default_rng(4)
    words = ["".join(rng.choice(list("abcdefghij"), 4)) for _ in range(60)]
    lines = [" ".join(rng.choice(words, 12)) for _ in range(300)]
    (folder / "text.txt").write_text("\n".join(lines) + "\n")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"]))
    own = folder / "tokenizer"
    own.mkdir()
    tokenizer.save(str(own / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "model_max_length": 1024}
    (own / "tokenizer_config.json").write_text(json.dumps(config))


def none(folder: Path) -> None:
    """Write nothing: the program makes its own."""


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
