"""The small run of each model family learns in a few steps on little data."""

import json

import h5py
import numpy as np
import pytest

from headwater.config import DecoderConfig, find_params, load_params, shipped_params
from headwater.config.models.decoder import FAMILIES as DECODERS
from headwater.trainer.session import fit

WORDS = [f"w{number}" for number in range(40)]
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
DECODER_NAMES = [
    name
    for name, path in shipped_params().items()
    if name.endswith("/tiny") and isinstance(load_params(path).init.model, DecoderConfig)
]


STEPS = 8


def losses(name, folder, **overrides):
    """Return the training losses of a shipped run with some keys overridden."""
    keys = {
        "trainer.init.model_dir": str(folder),
        "trainer.init.loop": {"max_steps": STEPS},
        "trainer.init.schedulers": [{"ConstantLR": {"learning_rate": 1e-3}}],  # their schedules begin at 0
        "trainer.init.logging.log_steps": 1,
        "trainer.init.checkpoint": {},
        "trainer.init.callbacks": [],
        "trainer.fit.val_dataloader": [],
    }
    fit(load_params(find_params(name), keys | overrides))
    records = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if record["kind"] == "train"]


def assert_learns(values):
    assert len(values) == STEPS
    assert sum(values[-2:]) / 2 < values[0] - 0.1


def loader(**keys):
    """Return overrides for the keys of the data loader."""
    return {f"trainer.fit.train_dataloader.{key}": value for key, value in keys.items()}


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """Write a text in which every second word is the same."""
    generator = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("book")
    places = generator.integers(0, len(WORDS), 12_000)
    places[::2] = 0
    sentences = [" ".join(WORDS[place] for place in part) for part in np.array_split(places, 1200)]
    text = "\n\n".join(".\n".join(part) for part in np.array_split(sentences, 100))
    (folder / "book.txt").write_text(text)
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL, *WORDS]))
    return folder


@pytest.fixture(scope="module")
def samples(book):
    """Return data for decoders, as `headwater data` makes them from the book."""
    return prepared(book, "samples", "--vocab_size", "300", "--sequence_length", "64")


def prepared(book, name, *arguments):
    from headwater.cli.main import main

    out = book / name
    assert main(["data", str(book / "book.txt"), "--out", str(out), "--processes", "1", *arguments]) == 0
    return out


def test_every_decoder_has_small_params():
    found = {load_params(find_params(name)).init.model.name for name in DECODER_NAMES}
    assert found == set(DECODERS) - {"gpt3"}, "a gpt3 is a gpt2"


@pytest.mark.parametrize("name", DECODER_NAMES)
def test_a_small_decoder_learns(name, samples, tmp_path):
    overrides = loader(data_dir=str(samples / "train"), batch_size=4, num_workers=0)
    assert_learns(losses(name, tmp_path, **overrides))


@pytest.mark.parametrize(
    ("name", "more"), [("bert/tiny", ()), ("roberta/tiny", ("--no-sentence_pairs",)), ("esm2/tiny", ())]
)
def test_a_small_encoder_learns(name, more, book, tmp_path):
    vocabulary = ("--mode", "masked", "--tokenizer", str(book / "vocab.txt"), "--sequence_length", "32")
    data = prepared(book, name.replace("/", "_"), *vocabulary, *more)
    sizes = {"vocab_size": len(SPECIAL) + len(WORDS), "max_position_embeddings": 32}
    if name == "esm2/tiny":
        sizes["mask_token_id"] = SPECIAL.index("[MASK]")
    model = {f"trainer.init.model.{key}": value for key, value in sizes.items()}
    keys = loader(data_dir=str(data / "train"), batch_size=16)
    assert_learns(losses(name, tmp_path, **model, **keys))


def test_a_small_encoder_decoder_learns(book, tmp_path):
    arguments = ("--mode", "span_corruption", "--vocab_size", "300", "--sequence_length", "64")
    data = prepared(book, "spans", *arguments)
    keys = loader(
        src_data_dir=str(data / "train"), src_vocab_file=str(data / "tokenizer.json"), batch_size=16
    )
    assert_learns(losses("t5/tiny", tmp_path, **keys))


def test_a_small_dpr_model_learns(tmp_path):
    """In the data, questions share tokens with the right passage."""
    generator = np.random.default_rng(0)
    questions = generator.integers(5, 45, (64, 1, 16))
    others = generator.integers(5, 45, (64, 1, 16))
    passages = np.concatenate([questions, others], axis=1)
    data = tmp_path / "data"
    data.mkdir()
    with h5py.File(data / "data-0.h5", "w") as file:
        for name, ids in (("questions", questions[:, 0]), ("ctx", passages)):
            file[f"{name}_input_ids"] = ids.astype(np.int32)
            file[f"{name}_attention_mask"] = np.ones_like(ids, dtype=np.int32)
            file[f"{name}_token_type_ids"] = np.zeros_like(ids, dtype=np.int32)
    keys = loader(data_dir=str(data), max_sequence_length=16)
    assert_learns(losses("dpr/tiny", tmp_path / "run", **keys))


def test_a_small_vision_model_learns(tmp_path):
    """In the data, the class is the brightness."""
    image = pytest.importorskip("PIL.Image")
    for split in ("train", "val"):
        for label in range(10):
            folder = tmp_path / "images" / split / str(label)
            folder.mkdir(parents=True)
            for number in range(8):
                pixels = np.full((32, 32, 3), 25 * label + number, dtype=np.uint8)
                image.fromarray(pixels).save(folder / f"{number}.png")
    assert_learns(losses("vit/tiny", tmp_path / "run", **loader(data_dir=str(tmp_path / "images"))))
    root = {"trainer.fit.train_dataloader.dataset.root": str(tmp_path / "images")}
    assert_learns(losses("dino/tiny", tmp_path / "dino", **root))
