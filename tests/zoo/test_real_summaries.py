"""Small models summarise real papers, by a sentence of the abstract and in new words."""

import gzip
import json
import math
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from torch.nn import functional as F

from headwater.config import find_params, load_params
from headwater.data.modes import ModeOptions
from headwater.data.prepare import prepare
from headwater.data.settings import PrepareSettings
from headwater.data.tokenizer import TrainBPE
from headwater.models.registry import build_model
from headwater.trainer.pretrained import checkpoint_weights
from headwater.trainer.session import fit
from shared_data import SHARED

PAPERS = SHARED / "data/summarization/scitldr"
VOCABULARY = SHARED / "data/vocab/bert/bert-base-uncased-vocab.txt"
LENGTH = 256


def prepared(source, folder, tokenizer, mode, **options):
    """Prepare samples that the shipped params read, without a validation split."""
    prepare(
        [source],
        folder,
        PrepareSettings(
            tokenizer, LENGTH, val_fraction=0, mode=mode, options=ModeOptions(longer="cut", **options)
        ),
    )
    return str(folder / "train")


def trained(params, folder, steps, keys):
    """Run shipped params; return the last evaluation and the model."""
    keys = {f"trainer.{key}": value for key, value in keys.items()}
    loop = {"max_steps": steps, "eval_frequency": steps}
    keys |= {"trainer.init.model_dir": str(folder / "run"), "trainer.init.loop": loop}
    config = load_params(find_params(params), keys)
    result = fit(config)
    model = build_model(config.init.model).eval()
    model.load_state_dict(dict(checkpoint_weights(Path(result.checkpoint))))
    return result.validation[-1], model


@pytest.mark.slow
@pytest.mark.real_data
def test_a_small_model_finds_the_summarising_sentence(tmp_path):
    """Always choosing the first sentence is right in 0.200 of the abstracts, and chance in 0.160."""
    if not PAPERS.is_dir():
        pytest.skip("the data sets are not here")
    train, dev = (
        prepared(
            PAPERS / f"{part}.jsonl.gz", tmp_path / part, VOCABULARY, "extractive_summarization",
            max_cls_tokens=20,
        )
        for part in ("train", "dev")
    )  # fmt: skip
    loaders = {"fit.train_dataloader": train, "fit.val_dataloader": dev, "validate.val_dataloader": dev}
    keys = {f"{loader}.data_dir": folder for loader, folder in loaders.items()}
    evaluation, _ = trained("bert/tiny_scitldr", tmp_path, 140, keys)
    assert evaluation.metrics["best_sentence"] > 0.23


def unigram_perplexity(learnt, rows):
    """Return the perplexity of the summaries in `rows` under the smoothed token frequencies in `learnt`."""
    counts = torch.bincount(learnt[:, 2][learnt[:, 1] == 1], minlength=2048).double() + 0.1
    shares = (counts / counts.sum()).log()
    return math.exp(-shares[rows[:, 2][rows[:, 1] == 1]].mean())


def of_next_documents(rows):
    """Return the samples with each document replaced by that of the next sample."""
    out = torch.zeros_like(rows)
    for number, row in enumerate(rows):
        following = rows[(number + 1) % len(rows)]
        summary = row[:, row[1] == 1]
        document = following[0, : int(following[1].argmax())][-(LENGTH - summary.shape[1]) :]
        count = len(document)
        out[number, 0, :count] = document
        out[number, :, count : count + summary.shape[1]] = summary
    return out


def losses(model, rows):
    """Return the loss of each sample, summed over its labels."""
    found = []
    for part in rows.split(16):
        with torch.no_grad():
            logits = model.logits(part[:, 0])
        each = F.cross_entropy(logits.float().mT, part[:, 2], reduction="none")
        found.append((each * part[:, 1]).sum(1))
    return torch.cat(found)


def samples(folder):
    with h5py.File(Path(folder) / "data-00000.h5") as file:
        return torch.from_numpy(file["data"][:].astype(np.int64))


@pytest.mark.slow
@pytest.mark.real_data
def test_summaries_depend_on_their_papers(tmp_path):
    """Words are predicted far better than by their frequency, and better than after another paper."""
    if not PAPERS.is_dir():
        pytest.skip("the data sets are not here")
    source, dev = PAPERS / "train.jsonl.gz", tmp_path / "dev.jsonl"
    with gzip.open(PAPERS / "dev.jsonl.gz", "rt") as lines:
        records = [json.loads(line) for line in lines]
    # The second summary of a paper would be guessed from the first.
    dev.write_text("".join(json.dumps({**each, "target": each["target"][:1]}) + "\n" for each in records))
    there = prepared(source, tmp_path / "there", TrainBPE(2048), "summarization")
    tokenizer = tmp_path / "there/tokenizer.json"
    turned = (("document", "target"), ("summary", "source"))
    back = prepared(source, tmp_path / "back", tokenizer, "summarization", keys=turned)
    held_out = prepared(dev, tmp_path / "dev", tokenizer, "summarization")
    mixture = [{"data_dir": there, "weight": 2}, {"data_dir": back, "weight": 1}]
    keys = {"fit.train_dataloader.mixture": mixture, "fit.val_dataloader.data_dir": held_out}
    _, model = trained(
        "gptj/tiny_scitldr", tmp_path, 200, keys | {"validate.val_dataloader.data_dir": held_out}
    )
    rows = samples(held_out)
    own, other = losses(model, rows), losses(model, of_next_documents(rows))
    perplexity = math.exp(own.sum() / rows[:, 1].sum())
    assert perplexity < 0.2 * unigram_perplexity(samples(there), rows)
    assert own.sum() < other.sum()
