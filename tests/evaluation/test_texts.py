"""`headwater evaluate --text`: compared with transformers on the same weights."""

import gzip
import json
import math

import pytest
import torch

from headwater.cli.main import main
from headwater.core.errors import DataError
from headwater.evaluation.texts import read_texts

RECORDS = [
    {"text": "The mill grinds the corn of the village.", "meta": {"pile_set_name": "Books"}},
    {"text": "The river runs past the mill. " * 12, "meta": {"pile_set_name": "Wiki"}},
    {"text": "Corn!", "meta": {"pile_set_name": "Books"}},
]


def log_likelihood(model, tokens, prefix):
    """Sum over the tokens of one text that fits into the context, computed by transformers."""
    ids = torch.tensor([[prefix, *tokens]])
    with torch.no_grad():
        scores = model(ids).logits[0, :-1].double().log_softmax(-1)
    return float(scores.gather(1, ids[0, 1:, None]).sum())


def test_bits_per_byte_of_each_subset_equal_those_of_transformers(library, tmp_path):
    transformers = pytest.importorskip("transformers")
    from headwater.data.tokenizer import load_tokenizer

    records = [RECORDS[0], RECORDS[2]]
    (tmp_path / "texts.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records))
    words = ["evaluate", library, "--text", tmp_path / "texts.jsonl", "--output_path", tmp_path / "out.json"]
    assert main(list(map(str, words))) == 0
    found = json.loads((tmp_path / "out.json").read_text())

    model = transformers.AutoModelForCausalLM.from_pretrained(library).eval()
    tokenizer = load_tokenizer(library)
    encoded = [tokenizer.encode(each["text"]).ids for each in records]
    total = sum(log_likelihood(model, tokens, tokenizer.token_to_id("<|endoftext|>")) for tokens in encoded)
    num_bytes = sum(len(each["text"].encode()) for each in records)
    assert found["Books"] == found["all"]
    assert found["all"]["tokens"] == sum(map(len, encoded))
    assert found["all"]["bits_per_byte"] == pytest.approx(-total / math.log(2) / num_bytes, rel=1e-6)
    assert found["all"]["perplexity"] == pytest.approx(math.exp(-total / sum(map(len, encoded))), rel=1e-5)


def test_long_texts_and_subsets(trained, tmp_path, capsys):
    with gzip.open(tmp_path / "texts.jsonl.gz", "wt") as file:
        file.writelines(f"{json.dumps(each)}\n" for each in RECORDS)
    (tmp_path / "alone.txt").write_text("The corn of the mill.")
    words = ["evaluate", trained, "--text", tmp_path / "texts.jsonl.gz", tmp_path / "alone.txt"]
    assert main(list(map(str, words))) == 0
    shown = capsys.readouterr().out
    assert [line.split()[1] for line in shown.splitlines() if line.startswith("│")] == [
        "Books", "Wiki", "alone.txt", "all",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("{", "JSON"),
        ('{"body": "x"}', "expected a text under 'text'.*keys: body"),
        ("[1]", "expected a text"),
    ],
)
def test_a_record_without_text_names_its_line(tmp_path, content, what):
    path = tmp_path / "texts.jsonl"
    path.write_text(f'{{"text": "a"}}\n{content}\n')
    with pytest.raises(DataError, match=what) as caught:
        list(read_texts(path))
    assert caught.value.where == f"{path}, line 2"


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        list(read_texts(tmp_path / "none.txt"))
