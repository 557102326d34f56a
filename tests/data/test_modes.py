"""The modes of `headwater data`: the records can be restored from the samples."""

import json

import h5py
import numpy as np
import pytest
from tokenizers import Tokenizer

from headwater.core.errors import ConfigError, DataError
from headwater.data.modes import ModeOptions
from headwater.data.prepare import prepare
from headwater.data.records import CSVRecords, open_records
from headwater.data.settings import PrepareSettings
from headwater.data.text.fields import (
    class_fields,
    masked_text_fields,
    preference_fields,
    retrieval_fields,
    sentence_fields,
)
from headwater.data.text.masking import NEEDED_TOKENS, MaskedTexts, Masking
from headwater.data.text.wordpiece import read_vocabulary
from headwater.data.tokenizer import TrainBPE

transformers = pytest.importorskip("transformers")

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>\n{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONVERSATION = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "What is the sea?"},
    {"role": "assistant", "content": "Water, with salt."},
    {"role": "user", "content": "And the sky?"},
    {"role": "assistant", "content": "Air  and light."},
]
SHAREGPT = {"system": "system", "user": "human", "assistant": "gpt"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory, book):
    """Return the folder of a small tokenizer."""
    trained = TrainBPE(600, ("<|endoftext|>", "<|im_start|>", "<|im_end|>")).train([book])
    path = tmp_path_factory.mktemp("tokenizer")
    trained.save(str(path / "tokenizer.json"))
    return path


def lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def make(source, mode, tokenizer, *, length=64, skip=False, **options):
    settings = PrepareSettings(
        tokenizer,
        length,
        val_fraction=0,
        mode=mode,
        options=ModeOptions(**options),
        skip_bad_records=skip,
    )
    return prepare([source], source.parent / mode, settings, overwrite=True)


def samples(source, mode):
    with h5py.File(source.parent / mode / "train/data-00000.h5") as file:
        return {name: file[name][:] for name in file}


def learnt(tokenizer, row):
    """Return the text of the labels that count in the loss."""
    decoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    return decoder.decode(row[2][row[1] == 1].tolist(), skip_special_tokens=False)


def test_loss_is_only_on_the_completion(tokenizer, tmp_path):
    source = lines(
        tmp_path / "a.jsonl",
        [
            {"prompt": "Name a fish.", "completion": " A pike."},
            {"instruction": "Double it.", "input": "4", "output": "8"},
            {"prompt": "Nothing?", "completion": " "},
            {"prompt": "long " * 90, "completion": "short"},
        ],
    )
    statistics = make(source, "prompt_completion", tokenizer)
    assert (statistics.empty_records, statistics.too_long_records, statistics.train_samples) == (1, 1, 2)
    rows = samples(source, "prompt_completion")["data"]
    assert {learnt(tokenizer, row) for row in rows} == {" A pike.<|endoftext|>", "8<|endoftext|>"}
    assert statistics.loss_tokens == rows[:, 1].sum()
    statistics = make(source, "prompt_completion", tokenizer, longer="cut")
    assert (statistics.cut_records, statistics.too_long_records, statistics.train_samples) == (1, 0, 3)
    rows = samples(source, "prompt_completion")["data"]
    assert "short<|endoftext|>" in {learnt(tokenizer, row) for row in rows}


@pytest.mark.parametrize("shape", ["openai", "sharegpt"])
def test_conversation_equals_the_template_of_transformers(tokenizer, tmp_path, shape):
    record = {"messages": CONVERSATION}
    if shape == "sharegpt":
        turns = [{"from": SHAREGPT[m["role"]], "value": m["content"]} for m in CONVERSATION[1:]]
        record = {"system": CONVERSATION[0]["content"], "conversations": turns}
    source = lines(tmp_path / "a.jsonl", [record])
    oracle = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tokenizer / "tokenizer.json"))
    expected = oracle.apply_chat_template(
        CONVERSATION,
        chat_template=CHATML,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    make(source, "chat", tokenizer, length=128, chat_template=CHATML)
    (row,) = samples(source, "chat")["data"]
    ids, mask = expected["input_ids"], expected["assistant_masks"]
    count = len(ids) - 1
    assert row[0, :count].tolist() == ids[:-1]
    assert row[2, :count].tolist() == ids[1:]
    assert row[1].tolist() == mask[1:] + [0] * (128 - count)


def test_tokenizers_without_a_chat_template_get_a_plain_template(tokenizer, tmp_path):
    source = lines(tmp_path / "a.jsonl", [{"messages": CONVERSATION}])
    make(source, "chat", tokenizer, length=128)
    (row,) = samples(source, "chat")["data"]
    assert learnt(tokenizer, row).split("<|endoftext|>\n\n") == ["Water, with salt.", "Air  and light.", ""]


def test_a_summary_follows_its_document(tokenizer, tmp_path):
    source = lines(tmp_path / "a.jsonl", [{"source": ["The sea rose.", "All fled."], "target": ["Flood."]}])
    make(source, "summarization", tokenizer)
    (row,) = samples(source, "summarization")["data"]
    assert learnt(tokenizer, row) == "Flood.<|endoftext|>"
    text = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).decode(row[0].tolist())
    assert text.startswith("The sea rose. All fled.\n\nTL;DR: Flood.")


@pytest.mark.parametrize("shape", ["texts", "messages"])
def test_preferences_round_trip(tokenizer, tmp_path, shape):
    record = {"prompt": "Sing.", "chosen": "La la la.", "rejected": "No."}
    if shape == "messages":
        asked = {"role": "user", "content": "Sing."}
        for side in ("chosen", "rejected"):
            record[side] = [asked, {"role": "assistant", "content": record[side]}]
    source = lines(tmp_path / "a.jsonl", [record])
    make(source, "preference", tokenizer)
    read = open_records(tmp_path / "preference/train", preference_fields(64, vocab_size=600), 64)
    batch = read.__getitems__([0])
    decoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    for side, answer in (("chosen", "La la la."), ("rejected", "No.")):
        ids, labels = batch[f"{side}_input_ids"][0], batch[f"{side}_labels"][0]
        assert (ids[labels >= 0] == labels[labels >= 0]).all()
        assert decoder.decode(labels[labels >= 0].tolist()).strip() == answer
        assert decoder.decode(ids.tolist()).startswith("Sing." if shape == "texts" else "### User:\nSing.")
    mask = samples(source, "preference")["chosen_attention_mask"][0]
    assert mask.sum() > (batch["chosen_labels"] >= 0).sum()


def test_questions_and_passages_have_the_tokens_of_bert(shared, tmp_path):
    vocabulary = shared / "vocab/bert/bert-base-uncased-vocab.txt"
    record = {
        "question": "Who wrote it?",
        "positive_ctxs": [{"title": "Books", "text": "Anne did."}],
        "hard_negative_ctxs": [{"title": "Ships", "text": "They sail."}, "Another."],
    }
    source = lines(tmp_path / "a.jsonl", [record])
    make(source, "embedding_pairs", vocabulary, length=12, num_passages=3)
    fields = retrieval_fields(12, 12, 3, vocab_sizes=(30522, 30522))
    batch = open_records(tmp_path / "embedding_pairs/train", fields, 12).__getitems__([0])
    oracle = transformers.BertTokenizer(str(vocabulary))
    # Title and text are a pair, as in the data of DPR's authors.
    texts = [("Books", "Anne did."), ("Ships", "They sail."), "Another."]
    expected = [oracle(*[text] if isinstance(text, str) else text) for text in texts]
    expected = oracle.pad(expected, padding="max_length", max_length=12, return_tensors="pt")
    assert batch["ctx_input_ids"][0].tolist() == expected["input_ids"].tolist()
    assert batch["ctx_attention_mask"][0].tolist() == expected["attention_mask"].tolist()
    assert batch["questions_input_ids"][0, :6].tolist() == oracle("Who wrote it?")["input_ids"]
    with pytest.raises(DataError, match=r"expected 4 hard negatives, got 2(?s:.*)--num_passages 3"):
        make(source, "embedding_pairs", vocabulary, length=12, num_passages=5)


def test_labelled_texts_have_the_tokens_of_bert(shared, tmp_path):
    vocabulary = shared / "vocab/bert/bert-base-uncased-vocab.txt"
    long = "the sea rose in the night and all fled " * 3
    records = [
        {"text": "It rained.", "label": "sad"},
        {"premise": "The sea rose.", "hypothesis": "All fled!", "label": "glad"},
        {"sentence1": "Up.", "sentence2": long, "label": "glad"},
    ]
    source = lines(tmp_path / "a.jsonl", records)
    statistics = make(source, "classification", vocabulary, length=24, labels=("sad", "glad"), longer="cut")
    assert (statistics.train_samples, statistics.cut_records) == (3, 1)
    batch = open_records(
        tmp_path / "classification/train",
        class_fields(24, vocab_size=30522, pad=0, segments=2, num_labels=2),
        24,
    ).__getitems__([0, 1, 2])
    oracle = transformers.BertTokenizer(str(vocabulary))
    texts = [[*record.values()][:-1] for record in records]
    found = {}
    for number, pair in enumerate(texts):
        expected = oracle(*pair, padding="max_length", truncation="longest_first", max_length=24)
        found[tuple(expected["input_ids"])] = number, expected
    for row in range(3):
        number, expected = found.pop(tuple(batch["input_ids"][row].tolist()))
        assert batch["attention_mask"][row].tolist() == expected["attention_mask"]
        assert batch["token_type_ids"][row].tolist() == expected["token_type_ids"]
        assert batch["labels"][row] == (0, 1, 1)[number]


def test_labelled_texts_of_a_tokenizer_without_special_tokens(tokenizer, tmp_path):
    source = lines(tmp_path / "a.jsonl", [{"text": "a b", "text_pair": "c d " * 30, "label": "1"}])
    assert make(source, "classification", tokenizer, length=16, longer="cut").cut_records == 1
    found = samples(source, "classification")
    end = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).token_to_id("<|endoftext|>")
    first = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode("a b").ids
    ids, types = found["input_ids"][0].tolist(), found["token_type_ids"][0].tolist()
    assert ids[: len(first) + 2] == [end, *first, end] and ids[-1] == end
    assert types == [0] * (len(first) + 2) + [1] * (14 - len(first))
    assert found["labels"].tolist() == [1]


@pytest.mark.parametrize(
    ("record", "labels", "said"),
    [
        ({"text": "a", "label": "glda"}, ("sad", "glad"), "expected a class of --labels, got 'glda'"),
        ({"text": "a", "label": "glad"}, (), "expected the number of a class, got 'glad'"),
        ({"text": "a", "label": -1}, (), "expected the number of a class, got -1"),
        ({"text": "a", "label": "12345678901"}, (), "expected the number of a class, got '12345678901'"),
        ({"text": "a", "label": True}, (), "expected the number of a class, got True"),
        ({"text": "a"}, (), "record has no field 'label'"),
    ],
)
def test_a_wrong_class(record, labels, said, tokenizer, tmp_path):
    with pytest.raises(DataError, match=said):
        make(lines(tmp_path / "a.jsonl", [record]), "classification", tokenizer, labels=labels)


def test_long_and_empty_labelled_texts_are_left_out(tokenizer, tmp_path):
    records = [{"text": "a " * 99, "label": 0}, {"text": " ", "label": 0}, {"text": "b", "label": 3}]
    statistics = make(lines(tmp_path / "a.jsonl", records), "classification", tokenizer)
    assert (statistics.too_long_records, statistics.empty_records, statistics.train_samples) == (1, 1, 1)
    fields = class_fields(64, vocab_size=600, pad=0, segments=0, num_labels=3)
    found = open_records(tmp_path / "classification/train", fields, 64).__getitems__([0])
    assert isinstance(found, DataError) and "num_labels" in found.remedy


def test_sentences_have_a_cls_token_and_a_label(shared, tmp_path):
    vocabulary = shared / "vocab/bert/bert-base-uncased-vocab.txt"
    texts, labels = ["The sea rose.", "All fled!", "", "We tell how."], [0, 1, 0, 1]
    source = lines(tmp_path / "a.jsonl", [{"source": texts, "source_labels": labels}])
    make(source, "extractive_summarization", vocabulary, max_cls_tokens=6)
    fields = sentence_fields(64, 6, vocab_size=30522, segments=2)
    batch = open_records(tmp_path / "extractive_summarization/train", fields, 64).__getitems__([0])
    oracle = transformers.BertTokenizer(str(vocabulary))
    parts = [oracle(text)["input_ids"] for text in texts]
    expected = [token for part in parts for token in part]
    count = len(expected)
    assert batch["input_ids"][0].tolist() == expected + [0] * (64 - count)
    assert batch["attention_mask"][0].tolist() == [1] * count + [0] * (64 - count)
    types = [number % 2 for number, part in enumerate(parts) for _ in part]
    assert batch["token_type_ids"][0].tolist() == types + [0] * (64 - count)
    starts = [place for place, token in enumerate(expected) if token == oracle.cls_token_id]
    assert batch["cls_indices"][0].tolist() == [*starts, 0, 0]
    assert batch["cls_label"][0].tolist() == [*labels, 0, 0]
    assert batch["cls_weights"][0].tolist() == [1, 1, 1, 1, 0, 0]


def test_last_sentences_of_long_texts_are_cut(tokenizer, tmp_path):
    records = [
        {"sentences": ["Up.", "The sea rose in the night and all fled. " * 9], "labels": [1, 0]},
        {"source": ["a"] * 5, "source_labels": [0, 0, 0, 0, 1]},
        {"source": ["", " "], "source_labels": [0, 1]},
        {"source": ["It fits."], "source_labels": [1]},
    ]
    source = lines(tmp_path / "a.jsonl", records)
    statistics = make(source, "extractive_summarization", tokenizer, max_cls_tokens=3)
    assert (statistics.too_long_records, statistics.empty_records, statistics.train_samples) == (2, 1, 1)
    statistics = make(source, "extractive_summarization", tokenizer, max_cls_tokens=3, longer="cut")
    assert (statistics.cut_records, statistics.train_samples) == (2, 3)
    weights = samples(source, "extractive_summarization")["cls_weights"]
    assert sorted(weights.sum(1).tolist()) == [1, 1, 3]
    for broken in ([1], [1, 2], "01"):
        source = lines(tmp_path / "b.jsonl", [{"source": ["a", "b"], "source_labels": broken}])
        with pytest.raises(DataError, match=r"b\.jsonl, line 1"):
            make(source, "extractive_summarization", tokenizer)


@pytest.fixture(scope="module")
def bert(shared):
    return shared / "vocab/bert/bert-base-uncased-vocab.txt"


def test_masked_pairs_are_texts_of_the_documents(shared, bert, tmp_path):
    """With the masked tokens restored, a pair is part of a document if and only if it is not random."""
    documents = [
        "The cat sat. It ran off! Then it slept. A dog came by. " * 9,
        "Ships sail. Wind blows. " * 15,
    ]
    source = lines(tmp_path / "a.jsonl", [{"text": text} for text in documents])
    make(source, "masked", bert, length=48)
    fields = masked_text_fields(48, 8, vocab_size=30522, pad=0, segments=2, next_sentence=True, spans=False)
    read = open_records(tmp_path / "masked/train", fields, 48)
    oracle = transformers.BertTokenizer(str(bert))
    tokenized = [" ".join(oracle.tokenize(text)) for text in documents]
    found = set()
    for number in range(len(read)):
        sample = read.sample(number)
        ids = sample["input_ids"].copy()
        counted = sample["masked_lm_weights"] == 1
        chosen = sample["masked_lm_positions"][counted]
        assert 0 < len(chosen) <= 8 and len(set(chosen)) == len(chosen)
        ids[chosen] = sample["masked_lm_ids"][counted]
        words = oracle.convert_ids_to_tokens(ids[sample["attention_mask"] == 1].tolist())
        assert words[0] == "[CLS]" and words[-1] == "[SEP]" and words.count("[SEP]") == 2
        middle = words.index("[SEP]")
        assert sample["token_type_ids"].sum() == len(words) - middle - 1
        first, second = " ".join(words[1:middle]), " ".join(words[middle + 1 : -1])
        random = int(sample["next_sentence_label"])
        found.add(random)
        assert all(any(part in text for text in tokenized) for part in (first, second))
        if random:
            assert not any(first in text and second in text for text in tokenized)
    assert found == {0, 1}


def test_dynamic_masks_are_drawn_in_training(shared, bert, tmp_path):
    source = lines(tmp_path / "a.jsonl", [{"text": "It's 5 o'clock, \"isn't it\"? Né. Öl! " * 20}] * 3)
    make(source, "masked", bert, length=40, dynamic_mask=True)
    files = [CSVRecords(path) for path in (tmp_path / "masked/train").glob("*.csv")]
    ids = read_vocabulary(bert, 30522, needed=NEEDED_TOKENS)
    masking = Masking(length=40, predictions=6, fraction=0.15, next_sentence=True, segments=2, seed=0)
    texts = MaskedTexts(files, ids, masking)
    first, second = (texts.__getitems__([draw])["input_ids"] for draw in (0, len(texts)))
    assert (first == 103).any() and (first != second).any()
    tokens = files[0].read(0, "tokens")
    assert tokens[0] == "[CLS]" and "[UNK]" not in tokens


@pytest.mark.parametrize("spm_rate", [0, 1])
def test_fill_in_the_middle_keeps_the_text(tokenizer, tmp_path, spm_rate):
    text = "The quick brown fox — jumped over ½ of the lazy dogs, didn't it?"
    source = lines(tmp_path / "a.jsonl", [{"text": text}] * 40)
    statistics = make(source, "fill_in_the_middle", tokenizer, length=80, fim_rate=0.8, spm_rate=spm_rate)
    decoder = Tokenizer.from_file(str(tmp_path / "fill_in_the_middle/tokenizer.json"))
    assert statistics.vocab_size == decoder.get_vocab_size() == 603
    rows = samples(source, "fill_in_the_middle")["data"]
    turned = 0
    for row in rows:
        for part in decoder.decode(row[0].tolist(), skip_special_tokens=False).split("<|endoftext|>"):
            if "<|fim_prefix|>" not in part:
                assert part in ("", text)
                continue
            turned += 1
            if spm_rate:
                assert part.startswith("<|fim_prefix|><|fim_suffix|>")
                suffix, _, rest = part.partition("<|fim_suffix|>")[2].partition("<|fim_middle|>")
                assert rest + suffix == text
            else:
                prefix, _, rest = part.removeprefix("<|fim_prefix|>").partition("<|fim_suffix|>")
                suffix, _, middle = rest.partition("<|fim_middle|>")
                assert prefix + middle + suffix == text
    assert 20 < turned < 40


def test_texts_for_span_corruption_are_lines(tokenizer, tmp_path):
    source = tmp_path / "a.txt"
    source.write_text("One line\nand more.\n\n  A second\tparagraph — é.\n\n\n")
    make(source, "span_corruption", tokenizer)
    found = (tmp_path / "span_corruption/train/data-00000.txt").read_text().splitlines()
    assert sorted(found) == ["A second paragraph — é.", "One line and more."]


@pytest.mark.parametrize("suffix", [".json", ".parquet"])
def test_other_files_hold_the_same_records(tokenizer, tmp_path, suffix):
    records = [{"prompt": f"Count to {n}.", "completion": "word " * n} for n in range(1, 50)]
    plain, other = lines(tmp_path / "a.jsonl", records), tmp_path / f"b{suffix}"
    if suffix == ".json":
        other.write_text(json.dumps(records, indent=1))
    else:
        pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pa.Table.from_pylist(records), other)
    rows = []
    for source in (plain, other):
        make(source, "prompt_completion", tokenizer)
        rows.append(samples(source, "prompt_completion")["data"])
    assert (rows[0] == rows[1]).all()


def test_bad_records_are_errors_or_counted(tokenizer, tmp_path):
    source = tmp_path / "a.jsonl"
    good = json.dumps({"prompt": "a", "completion": "b"})
    source.write_text(f'{good}\n{{"prompt": \n{{"prompt": "x", "reply": "y"}}\n{good}\n')
    with pytest.raises(DataError, match="line is not JSON") as caught:
        make(source, "prompt_completion", tokenizer)
    assert caught.value.where == f"{source}, line 2"
    assert make(source, "prompt_completion", tokenizer, skip=True).bad_records == 2
    with pytest.raises(DataError, match=r"(?s)no field 'completion'.*'prompt', 'reply'.*line 3.*--keys"):
        source.write_text(f'{good}\n{good}\n{{"prompt": "x", "reply": "y"}}\n')
        make(source, "prompt_completion", tokenizer)
    source.write_text('{"prompt": "x", "reply": "y"}\n' * 3)
    assert make(source, "prompt_completion", tokenizer, keys=(("completion", "reply"),)).train_samples == 3


def test_incompatible_settings_are_refused(tokenizer, tmp_path):
    source = lines(tmp_path / "a.jsonl", [{"text": "a"}])
    with pytest.raises(ConfigError, match=r"(?s)unknown mode 'chatt'.*chat"):
        make(source, "chatt", tokenizer)
    with pytest.raises(ConfigError, match="preference does not pack"):
        make(source, "preference", tokenizer, use_vsl=True)
    with pytest.raises(DataError, match=r"mode masked needs the tokens \[PAD\], \[CLS\]"):
        make(source, "masked", tokenizer)
    with pytest.raises(ConfigError, match=r"expected fim_rate in \[0, 1\], got 2"):
        ModeOptions(fim_rate=2)
    text = tmp_path / "a.txt"
    text.touch()
    with pytest.raises(DataError, match="reads records"):
        make(text, "chat", tokenizer)


def test_spans_positions_and_labels_match_the_tokens(tokenizer, tmp_path):
    source = lines(tmp_path / "a.jsonl", [{"prompt": "ab", "completion": "c" * n} for n in range(1, 30)])
    statistics = make(source, "prompt_completion", tokenizer, use_vsl=True)
    rows = samples(source, "prompt_completion")["data"]
    ids, mask, labels, span, positions = np.moveaxis(rows, 1, 0)
    padding = (rows[:, [1, 3, 4]] == 0).all(1) & (np.roll(span, 1, axis=1) == 0)
    assert statistics.padding_tokens <= padding.sum()
    starts = positions[:, 1:] == 0
    inside = ~starts
    assert (labels[:, :-1][inside] == ids[:, 1:][inside]).all()
    assert (span[:, :-1][inside] == span[:, 1:][inside] + 1).all()
    assert mask.sum() == statistics.loss_tokens
