"""LLaVA learns captions of photographs, and uses the images."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from headwater.config import find_params, load_params
from headwater.data.modes import ModeOptions
from headwater.data.packing import split_samples
from headwater.data.prepare import prepare
from headwater.data.settings import PrepareSettings
from headwater.data.tokenizer import TrainBPE
from headwater.models.registry import build_model
from headwater.trainer.datasets import open_data
from headwater.trainer.pretrained import checkpoint_weights
from headwater.trainer.session import fit
from shared_data import SHARED

COCO = SHARED / "data" / "image_text" / "coco"
IMAGES = 81
TRAINED = 4
"""Captions of each image that are trained on; the fifth is not."""


def prepared(folder):
    """Prepare captions for training and for validation, as the shipped params read them."""
    records = [json.loads(line) for line in (COCO / "captions.jsonl").read_text().splitlines()]
    texts = [caption for record in records for caption in record["captions"][:TRAINED]]
    TrainBPE(1000).train(texts).save(str(folder / "tokenizer.json"))
    options = ModeOptions(image_dir=COCO, num_features=16, longer="cut")
    settings = PrepareSettings(
        folder / "tokenizer.json", 48, val_fraction=0, mode="image_text", options=options
    )
    for split, part in (("train", slice(0, TRAINED)), ("val", slice(TRAINED, None))):
        lines = [json.dumps({**record, "captions": record["captions"][part]}) for record in records]
        (folder / f"{split}.jsonl").write_text("\n".join(lines))
        prepare([folder / f"{split}.jsonl"], folder / split, settings)


def params(folder, **more):
    keys = {"trainer.init.model_dir": str(folder / "run"), **more}
    for loader, split in (("fit.train", "train"), ("fit.val", "val"), ("validate.val", "val")):
        keys[f"trainer.{loader}_dataloader.data_dir"] = str(folder / split / "train")
        keys[f"trainer.{loader}_dataloader.img_data_dir"] = str(COCO)
    return load_params(find_params("llava/tiny_coco"), keys)


def found_images(model, loader, every):
    """Return how often a caption is likelier with its image than with three others.

    For a model that ignores images all four are equally likely.
    """
    (batch,) = open_data(loader, model.config, seed=0, repeat=False).create_dataloader()
    # Where each record's first caption is: preparation shuffles them.
    places = np.argsort(split_samples(IMAGES * every, 0, 0)["train"])
    batch = {name: value[places] for name, value in batch.items()}
    captions = torch.arange(IMAGES) * every
    own = {name: value[captions] for name, value in batch.items()}
    losses = []
    for other in range(4):
        shown = own | {"images": batch["images"][(captions + other * 20 * every) % (IMAGES * every)]}
        with torch.no_grad():
            rows = F.cross_entropy(model.logits(shown).mT, own["labels"], reduction="none")
        losses.append((rows * own["attention_mask"]).sum(1))
    return float((torch.stack(losses[1:]).amin(0) > losses[0]).float().mean())


@pytest.mark.slow
@pytest.mark.real_data
def test_llava_learns_captions_and_uses_the_images(tmp_path):
    """Chance finds 0.25 of the images; the best smoothed bigrams have loss 4.34 on the held-out captions."""
    if not COCO.is_dir():
        pytest.skip("the data sets are not here")
    prepared(tmp_path)
    result = fit(params(tmp_path))
    assert result.validation[-1].loss < 4.3
    whole = {"trainer.fit.train_dataloader.shuffle": False}
    sizes = {"train": IMAGES * TRAINED, "val": IMAGES}
    whole |= {f"trainer.fit.{split}_dataloader.batch_size": size for split, size in sizes.items()}
    config = params(tmp_path, **whole)
    model = build_model(config.init.model).eval()
    model.load_state_dict(dict(checkpoint_weights(Path(result.checkpoint))))
    assert found_images(model, config.fit.train_dataloader, TRAINED) >= 0.9
    assert found_images(model, config.fit.val_dataloader[0], 1) >= 0.4
