"""Recipes trained at toy size, and photos of the forms in which people have them."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from shoestring.cli import main

MODULES = str(Path(__file__).parents[1] / "clients" / "node_modules")
"""What npm has installed for the tests, the data of the recipe `reply` among it."""


def train_toy(folders, recipe, *arguments):
    """The folder of a short run of a recipe."""
    folder = folders.mktemp(recipe) / "run"
    assert main(["train", recipe, *arguments, "--folder", str(folder)]) == 0
    return folder


def save_pretrained(folder, kind):
    """A tiny BERT or RoBERTa with random weights and a tokenizer of words."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<s>", "<pad>", "</s>", "<unk>", "ant", "bee", "cow", "dog", "small", "large"]
    engine = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "<unk>"))
    engine.pre_tokenizer = pre_tokenizers.Whitespace()
    sizes = {"vocab_size": len(words), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = getattr(transformers, f"{kind}Config")(
        **sizes, intermediate_size=16, max_position_embeddings=130, pad_token_id=1
    )
    torch.manual_seed(0)
    getattr(transformers, f"{kind}Model")(config).save_pretrained(folder)
    engine.save(str(folder / "tokenizer.json"))


def save_photos(folder, coloured):
    """A picture (height, width, 3) as PNG of 8 and 16 bits, as CMYK, from a turned camera, and broken off."""
    folder.mkdir()
    grey = np.asarray(Image.fromarray(coloured).convert("L"))
    Image.fromarray(grey).save(folder / "grey.png")
    Image.fromarray(grey.astype(np.uint16) * 257).save(folder / "deep.png")
    Image.fromarray(coloured).convert("CMYK").save(folder / "print.jpg", quality=95)
    exif = Image.Exif()
    exif[0x0112] = 8
    Image.fromarray(np.rot90(coloured, -1).copy()).save(folder / "turned.jpg", exif=exif, quality=95)
    (folder / "broken.jpg").write_bytes((folder / "print.jpg").read_bytes()[:300])
