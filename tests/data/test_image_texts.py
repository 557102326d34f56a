"""Texts with images: preparation of captions and conversations, and batches compared with transformers."""

import json

import h5py
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from headwater.config.data import GptDataConfig, ImageTextDataConfig
from headwater.config.models.multimodal import LlavaConfig, MultimodalSimpleConfig
from headwater.core.errors import ConfigError, DataError
from headwater.data.modes import ModeOptions
from headwater.data.packing import split_samples
from headwater.data.prepare import prepare
from headwater.data.settings import PrepareSettings
from headwater.data.tokenizer import END_OF_TEXT, TrainBPE
from headwater.models.registry import build_model
from headwater.trainer.datasets import open_data

Image = pytest.importorskip("PIL.Image")
from headwater.data.multimodal.conversations import VICUNA  # noqa: E402

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
TRANSFORMS = [
    {"name": "expand_to_square", "background_color": [122, 116, 104]},
    {"name": "resize", "size": 16, "interpolation": "bicubic"},
    {"name": "center_crop", "size": 16},
    {"name": "to_tensor"},
    {"name": "normalize", "mean": list(MEAN), "std": list(STD)},
]
ENCODER = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "filter_size": 24,
    "image_size": [16, 16],
    "patch_size": [8, 8],
}
TEXT = {
    "name": "llama",
    "vocab_size": 400,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "max_position_embeddings": 200,
}
PROJECTOR = {"input_unit": 16, "layers_units": [16, 16], "layers_activation": ["gelu", None]}
MODEL = LlavaConfig.model_validate(
    {
        "name": "llava",
        "image_model": ENCODER,
        "projector": {"image_model": PROJECTOR},
        "text_model": TEXT,
        "image_start_idx": 3,
    }
)
FEATURES = 4
LENGTH = 160

RECORDS = [
    {"image": "a.png", "captions": ["A dog.", "A brown dog in the snow."]},
    {
        "image": ["b.png", "a.png"],
        "conversations": [
            {"from": "human", "value": "<image>\nWhat is it? Compare it with <image>."},
            {"from": "gpt", "value": "It is a cat."},
            {"from": "human", "value": "Why?"},
            {"from": "gpt", "value": "It says so."},
        ],
    },
    {
        "image": "b.png",
        "conversations": [{"from": "user", "value": "Who?"}, {"from": "assistant", "value": "A cat."}],
    },
    {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Good morning."}]},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    words = "A brown dog in the snow. It is a cat. Why? It says so. Good morning. " + VICUNA.system
    return TrainBPE(400).train([words] * 3)


@pytest.fixture
def pictures(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    for number, (name, size) in enumerate({"a.png": (40, 20), "b.png": (24, 50)}.items()):
        pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name)
    return folder


def prepared(tmp_path, tokenizer, pictures, records=RECORDS, *, skip=False, length=LENGTH, **options):
    """Prepare texts with images, and return the statistics."""
    source = tmp_path / "records.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    keys = {"image_dir": pictures, "num_features": FEATURES, "num_images": 2, "image_token_id": 9}
    settings = PrepareSettings(
        tmp_path / "tokenizer.json",
        length,
        val_fraction=0,
        mode="image_text",
        options=ModeOptions(**keys | options),
        skip_bad_records=skip,
    )
    return prepare([source], tmp_path / "data", settings)


def section(tmp_path, **changes):
    keys = {
        "data_processor": "MultimodalSimpleHDF5MapDataProcessor",
        "data_dir": str(tmp_path / "data" / "train"),
        "img_data_dir": str(tmp_path / "images"),
        "image_data_size": [3, 16, 16],
        "transforms": TRANSFORMS,
        "batch_size": 1,
        "drop_last": False,
        **changes,
    }
    return ImageTextDataConfig.model_validate(keys)


def batches(tmp_path, model=MODEL, **changes):
    return list(open_data(section(tmp_path, **changes), model, seed=0, repeat=False).create_dataloader())


def in_order(read):
    """Return batches of one sample in the order of the records, which preparation has shuffled."""
    return [read[place] for place in np.argsort(split_samples(len(read), 0, 0)["train"])]


def test_samples_contain_the_records(tmp_path, tokenizer, pictures):
    statistics = prepared(tmp_path, tokenizer, pictures)
    read = in_order(batches(tmp_path))
    assert (statistics.documents, statistics.train_samples, statistics.images, len(read)) == (4, 5, 5, 5)
    end, learnt = tokenizer.token_to_id(END_OF_TEXT), []
    for batch in read:
        ids, labels, mask = (batch[name][0] for name in ("input_ids", "labels", "attention_mask"))
        assert torch.equal(labels[:-1][mask[:-1] == 1], ids[1:][mask[:-1] == 1])
        learnt.append(tokenizer.decode(labels[mask == 1].tolist(), skip_special_tokens=False))
        places = batch["image_places"][0]
        images = ids == 9
        assert torch.equal(images.nonzero().flatten(), places[places < LENGTH].sort().values)
    assert learnt == [
        f"A dog.{END_OF_TEXT}",
        f"A brown dog in the snow.{END_OF_TEXT}",
        f"It is a cat.{END_OF_TEXT}It says so.{END_OF_TEXT}",
        f"A cat.{END_OF_TEXT}",
        f"Good morning.{END_OF_TEXT}",
    ]
    assert [int((batch["image_places"] < LENGTH).sum()) // FEATURES for batch in read] == [1, 1, 2, 1, 0]
    ids = read[2]["input_ids"][0]
    text = tokenizer.decode(ids[(ids != 9) & (ids != end)].tolist())
    assert text == (
        f"{VICUNA.system}USER: \nWhat is it? Compare it with . ASSISTANT: It is a cat."
        "USER: Why? ASSISTANT: It says so."
    )
    with h5py.File(tmp_path / "data" / "train" / "data-00000.h5") as file:
        assert file["data"].shape == (5, 5, LENGTH) and file["img_data_loc"].shape == (5, 2, FEATURES)
        padding, image = file["data"][:, 3], file["data"][:, 4]
    assert statistics.tokens == padding.size - padding.sum() - image.sum()


def test_images_equal_those_of_transformers(tmp_path, tokenizer, pictures):
    transformers = pytest.importorskip("transformers")
    processor = transformers.LlavaImageProcessorPil(
        do_pad=True, size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}
    )
    prepared(tmp_path, tokenizer, pictures)
    expected = {
        name: processor(Image.open(pictures / name), return_tensors="pt")["pixel_values"][0]
        for name in ("a.png", "b.png")
    }
    read = in_order(batches(tmp_path))
    for batch, names in zip(read, [["a.png"], ["a.png"], ["b.png", "a.png"], ["b.png"], []], strict=True):
        for image, name in zip(batch["images"][0], names, strict=False):
            torch.testing.assert_close(image, expected[name], rtol=1e-5, atol=1e-5)
        assert not batch["images"][0, len(names) :].any()


def stored(tmp_path, tokens, mask, padding, paths):
    """Write a file of the public layout with one image at one position."""
    folder = tmp_path / "data" / "train"
    folder.mkdir(parents=True)
    tokens, mask, padding = (np.asarray(each, dtype=np.int32) for each in (tokens, mask, padding))
    labels = np.roll(tokens, -1, axis=1)
    with h5py.File(folder / "train.h5", "w") as file:
        file["data"] = np.stack([tokens, mask, labels, padding], axis=1)
        file["img_path"] = np.array(paths, dtype=object)[:, None]


def test_files_without_places_use_the_place_of_the_model(tmp_path, pictures):
    """A text without an image has padding in its place; the loss equals that of the text without padding."""
    stored(
        tmp_path,
        tokens=[[1, 5, 6, 0, 0, 0, 0, 7, 8, 4, 3, 0], [1, 5, 6, 0, 0, 0, 0, 7, 8, 4, 3, 0]],
        mask=[[0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0]],
        padding=[[0] * 11 + [1], [0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1]],
        paths=["a.png", "None"],
    )
    with_image, without = batches(tmp_path, data_processor="LlavaHDF5MapDataProcessor")
    assert with_image["image_places"].flatten().tolist() == [3, 4, 5, 6]
    assert with_image["input_ids"].tolist() == [[1, 5, 6, 0, 0, 0, 0, 7, 8, 4, 3, 0]]
    assert without["image_places"].flatten().tolist() == [12] * 4
    assert without["input_ids"].tolist() == [[1, 5, 6, 7, 8, 4, 3, 0, 0, 0, 0, 0]]
    model = build_model(MODEL).eval()
    text = model.text_model
    short = {
        "input_ids": torch.tensor([[1, 5, 6, 7, 8, 4]]),
        "labels": torch.tensor([[5, 6, 7, 8, 4, 3]]),
        "attention_mask": torch.tensor([[0, 0, 0, 1, 1, 1]]),
    }
    with torch.no_grad():
        torch.testing.assert_close(model(without), text(short))
        assert model(with_image) != text({name: with_image[name] for name in short})


def test_several_images_without_places_are_refused(tmp_path, pictures):
    stored(tmp_path, [[1] * 12], [[1] * 12], [[0] * 12], ["a.png"])
    config = MultimodalSimpleConfig.model_validate(
        {
            "name": "multimodal_simple",
            "image_model_list": {
                "image_models": [{"image_encoder": ENCODER}],
                "global_image_projection": PROJECTOR,
            },
            "text_model": TEXT,
        }
    )
    with pytest.raises(DataError, match="lacks img_data_loc"):
        batches(tmp_path, config)


def test_error_names_the_damaged_image(tmp_path, tokenizer, pictures):
    prepared(tmp_path, tokenizer, pictures)
    (pictures / "a.png").write_bytes(b"no image")
    with pytest.raises(DataError, match="cannot read the image") as error:
        batches(tmp_path)
    assert error.value.where == str(pictures / "a.png")


@pytest.mark.parametrize(
    ("record", "changes", "message"),
    [
        ({"image": "c.png", "captions": ["x"]}, {}, "image c.png does not exist"),
        ({"image": "a.png"}, {}, "neither captions nor conversations"),
        ({"image": "a.png", "captions": "x"}, {}, "expected a list of texts in captions"),
        ({"image": 3, "captions": ["x"]}, {}, "expected a file name"),
        ({"image": ["a.png"] * 3, "captions": ["x"]}, {}, "3 images, but num_images is 2"),
        ({"conversations": [{"from": "cat", "value": "x"}]}, {}, "expected turns with `from`"),
        (
            {"image": "a.png", "conversations": [{"from": "human", "value": "<image> <image>"}]},
            {},
            "expected 1 marks <image>, one per image; got 2",
        ),
        ({"image": "a.png", "captions": ["x"]}, {"length": 3}, "an image ends at token 4"),
    ],
)
def test_records_that_cannot_be_used(record, changes, message, tmp_path, tokenizer, pictures):
    with pytest.raises(DataError, match=message) as error:
        prepared(tmp_path, tokenizer, pictures, [record], **changes)
    assert "records.jsonl, line 1" in (error.value.where or "")
    assert not (tmp_path / "data").exists()
    if not changes:
        statistics = prepared(tmp_path, tokenizer, pictures, [record, RECORDS[0]], skip=True)
        assert (statistics.train_samples, statistics.bad_records) == (2, 1)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"length": 300}, DataError, "300 tokens"),
        ({"num_features": 5}, DataError, "takes 5 positions in the data, 4 in the model"),
        ({"transforms": TRANSFORMS[3:]}, DataError, "expected an image of shape"),
        ({"image_data_size": [3, 8, 8]}, ConfigError, "image_data_size"),
    ],
)
def test_data_that_do_not_fit_the_model(changes, error, message, tmp_path, tokenizer, pictures):
    settings = {key: value for key, value in changes.items() if key in ("length", "num_features")}
    prepared(tmp_path, tokenizer, pictures, **settings)
    with pytest.raises(error, match=message):
        batches(tmp_path, **{key: value for key, value in changes.items() if key not in settings})


def test_error_names_the_token_outside_the_vocabulary(tmp_path, pictures):
    stored(tmp_path, [[1, 500] * 6], [[1] * 12], [[0] * 12], ["a.png"])
    with pytest.raises(DataError, match=r"expected token ids below .* got 500") as error:
        batches(tmp_path)
    assert "501 or more" in (error.value.remedy or "")


def test_missing_image_folder_is_an_error(tmp_path, tokenizer, pictures):
    prepared(tmp_path, tokenizer, pictures)
    with pytest.raises(DataError, match="img_data_dir is not a folder"):
        batches(tmp_path, img_data_dir=str(tmp_path / "elsewhere"))


def test_text_model_refuses_samples_with_images(tmp_path, tokenizer, pictures):
    """They have the same number of rows as packed texts, but with another meaning."""
    prepared(tmp_path, tokenizer, pictures)
    keys = {"data_processor": "GptHDF5MapDataProcessor", "data_dir": str(tmp_path / "data" / "train")}
    loader = GptDataConfig.model_validate({**keys, "batch_size": 1})
    with pytest.raises(DataError, match="texts with images"):
        open_data(loader, MODEL.text_model, seed=0, repeat=False)


def test_missing_or_invalid_options_are_errors(tmp_path, tokenizer, pictures):
    for changes, message in (
        ({"num_features": None}, "needs --num_features"),
        ({"num_features": 0}, "expected num_features of at least 1, got 0"),
        ({"image_token_id": -1}, "expected image_token_id of at least 0, got -1"),
        ({"image_dir": tmp_path / "elsewhere"}, "image_dir is not a folder"),
    ):
        with pytest.raises(ConfigError, match=message):
            prepared(tmp_path, tokenizer, pictures, **changes)


def test_error_says_why_all_records_were_left_out(tmp_path, tokenizer, pictures):
    records = [{"image": "c.png", "captions": ["x"]}, {"image": "a.png", "captions": ["", "A dog. " * 99]}]
    with pytest.raises(DataError, match="cannot be used: 1, empty: 1, too long: 1") as error:
        prepared(tmp_path, tokenizer, pictures, records, skip=True)
    assert "--longer cut" in (error.value.remedy or "")


def test_long_samples_are_left_out_or_cut(tmp_path, tokenizer, pictures):
    records = [{"image": "a.png", "captions": ["A brown dog in the snow. " * 40, "A dog."]}]
    statistics = prepared(tmp_path, tokenizer, pictures, records)
    assert (statistics.train_samples, statistics.too_long_records, statistics.cut_records) == (1, 1, 0)
    (tmp_path / "data").rename(tmp_path / "others")
    statistics = prepared(tmp_path, tokenizer, pictures, records, longer="cut")
    assert (statistics.train_samples, statistics.too_long_records, statistics.cut_records) == (2, 0, 1)
    counted = [int(batch["attention_mask"].sum()) for batch in in_order(batches(tmp_path))]
    # All positions except those of the image; the last of these predicts the first token.
    assert counted[0] == LENGTH - FEATURES + 1
    assert counted[1] == len(tokenizer.encode("A dog.").ids) + 1


def test_samples_without_an_answer_are_left_out(tmp_path, tokenizer, pictures):
    question = {"conversations": [{"from": "human", "value": "Why?"}]}
    records = [{"image": "a.png", "captions": [" ", "A dog."]}, question]
    statistics = prepared(tmp_path, tokenizer, pictures, records)
    assert (statistics.train_samples, statistics.empty_records) == (1, 2)


def test_a_text_may_begin_with_a_token(tmp_path, tokenizer, pictures):
    prepared(tmp_path, tokenizer, pictures, begin_of_text=END_OF_TEXT)
    assert all(batch["input_ids"][0, 0] == tokenizer.token_to_id(END_OF_TEXT) for batch in batches(tmp_path))
    with pytest.raises(DataError, match="no token <s>"):
        prepared(tmp_path / "images", tokenizer, pictures, begin_of_text="<s>")
