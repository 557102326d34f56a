"""Encoders compared with transformers: hidden states, logits, losses, and bit-exact round trips."""

import re

import pytest
import torch
from conversions import losses_of_a_step, stored

from headwater.convert.checkpoint import export_hf, import_hf
from headwater.convert.formats.bert import BERT_CLASSIFIER
from headwater.core.errors import ConfigError
from headwater.models.registry import build_model

transformers = pytest.importorskip("transformers")

_SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_ESM = {
    **_SIZES,
    "position_embedding_type": "rotary",
    "token_dropout": True,
    "mask_token_id": 4,
    "pad_token_id": 1,
}
CASES = {
    "bert": ("Bert", "ForPreTraining", {**_SIZES, "max_position_embeddings": 24}),
    "bert-relu": ("Bert", "ForPreTraining", {**_SIZES, "hidden_act": "relu", "type_vocab_size": 3}),
    "classifier": ("Bert", "ForSequenceClassification", {**_SIZES, "num_labels": 3}),
    "tokens": ("Bert", "ForTokenClassification", {**_SIZES, "num_labels": 5}),
    "questions": ("Bert", "ForQuestionAnswering", _SIZES),
    "roberta": ("Roberta", "ForMaskedLM", {**_SIZES, "max_position_embeddings": 26, "type_vocab_size": 1}),
    "roberta-untied": ("Roberta", "ForMaskedLM", {**_SIZES, "tie_word_embeddings": False, "pad_token_id": 2}),
    "esm": ("Esm", "ForMaskedLM", _ESM),
    "esm-no-dropout": ("Esm", "ForMaskedLM", {**_ESM, "token_dropout": False}),
}  # fmt: skip


@pytest.fixture(params=CASES)
def case(request, tmp_path):
    family, task, sizes = CASES[request.param]
    torch.manual_seed(3)
    theirs = getattr(transformers, f"{family}{task}")(getattr(transformers, f"{family}Config")(**sizes))
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    theirs.eval().save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    return theirs, tmp_path


def inputs(theirs):
    """Return two texts; one is padded."""
    config = theirs.config
    ids = torch.randint(5, 61, (2, 20), generator=torch.Generator().manual_seed(0))
    ids[0, 3] = 4
    mask = torch.ones_like(ids)
    mask[1, 14:] = 0
    ids[1, 14:] = config.pad_token_id
    batch = {"input_ids": ids, "attention_mask": mask}
    segments = getattr(config, "type_vocab_size", 0)
    if segments > 1:
        batch["token_type_ids"] = (torch.arange(20) > 7).long().expand(2, 20)
    return batch


def loaded(folder):
    config, tensors = import_hf(folder)
    model = build_model(config).eval()
    tied = getattr(config, "share_embedding_weights", False)
    model.load_state_dict(dict(tensors), strict=not tied)
    return model


def test_logits_equal_transformers(case):
    theirs, folder = case
    model, batch = loaded(folder / "theirs"), inputs(theirs)
    text = batch["attention_mask"].bool()
    with torch.no_grad():
        expected, ours = theirs(**batch), model.logits(batch)
        if "start_logits" in expected:
            pairs = list(zip(ours, (expected.start_logits, expected.end_logits), strict=True))
        else:
            logits = expected.prediction_logits if "prediction_logits" in expected else expected.logits
            pairs = [(ours, logits)]
        if getattr(model, "nsp", None) is not None:
            follows = model.nsp(model.pooler(model.encode(batch)))
            pairs.append((follows, expected.seq_relationship_logits))
    for ours, logits in pairs:
        if ours.shape[:2] == text.shape:
            ours, logits = ours[text], logits[text]
        torch.testing.assert_close(ours, logits, rtol=1e-5, atol=1e-5)


def test_an_export_of_an_import_has_the_same_bits_and_loads(case):
    theirs, folder = case
    model = loaded(folder / "theirs")
    export_hf(model.named_parameters(), model.config, folder / "ours", max_shard_bytes=20_000)
    before, after = (stored(folder / kind) for kind in ("theirs", "ours"))
    before = {
        re.sub("gamma$", "weight", re.sub("beta$", "bias", name)): tensor for name, tensor in before.items()
    }
    unused = {name for name in before if "contact_head" in name or name.endswith("inv_freq")}
    assert set(before) - unused == set(after)
    if "lm_head.decoder.bias" in before:
        unused.add("lm_head.bias")  # a copy that transformers does not read
    assert all(torch.equal(before[name], after[name]) for name in after if name not in unused)
    again, info = type(theirs).from_pretrained(folder / "ours", output_loading_info=True)
    absent = ("contact_head", "inv_freq")  # neither has an effect on the logits that are compared
    assert not [name for name in info["missing_keys"] if not any(part in name for part in absent)]
    assert not info["unexpected_keys"] and not info["mismatched_keys"]
    with torch.no_grad():
        batch = inputs(theirs)
        torch.testing.assert_close(again(**batch)[0], theirs(**batch)[0], rtol=1e-5, atol=1e-5)


def test_training_step_has_the_same_loss(case):
    theirs, folder = case
    model, batch = loaded(folder / "theirs"), inputs(theirs)
    ours, labels = _labels(type(theirs).__name__, batch)
    if hasattr(model.config, "mlm_loss_scaling"):
        model.config = model.config.model_copy(update={"mlm_loss_scaling": "num_masked"})
    losses = []
    for module, loss in (
        (model, lambda: model({**batch, **ours})),
        (theirs, lambda: theirs(**batch, **labels).loss),
    ):
        losses.append(losses_of_a_step(module, loss))
    # The gradient of the key biases is zero except for rounding, which Adam turns into a full step.
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
    assert losses[0][1] < losses[0][0]


def _labels(name, batch):
    """Return the labels for our model and for theirs."""
    generator = torch.Generator().manual_seed(9)
    if "PreTraining" in name or "MaskedLM" in name:
        positions, answers = (
            torch.tensor([[1, 3, 9], [2, 5, 0]]),
            torch.randint(5, 61, (2, 3), generator=generator),
        )
        weights = torch.tensor([[1, 1, 1], [1, 1, 0]])
        labels = torch.full((2, 20), -100)
        for row in range(2):
            for place, answer, weight in zip(positions[row], answers[row], weights[row], strict=True):
                if weight:
                    labels[row, place] = answer
        ours = {"masked_lm_positions": positions, "masked_lm_ids": answers, "masked_lm_weights": weights}
        if "PreTraining" not in name:
            return ours, {"labels": labels}
        follows = torch.tensor([1, 0])
        return {**ours, "next_sentence_label": follows}, {"labels": labels, "next_sentence_label": follows}
    if "QuestionAnswering" in name:
        places = {"start_positions": torch.tensor([2, 5]), "end_positions": torch.tensor([4, 5])}
        return places, places
    if "Token" in name:
        labels = torch.randint(0, 5, (2, 20), generator=generator)
        labels[batch["attention_mask"] == 0] = -100
        return {"labels": labels}, {"labels": labels}
    labels = torch.tensor([2, 0])
    return {"labels": labels}, {"labels": labels}


def test_export_refuses_what_the_formats_cannot_express(tmp_path):
    from headwater.config.models.encoder import BertConfig

    sizes = {"name": "bert", "hidden_size": 32, "num_heads": 4, "num_hidden_layers": 1, "filter_size": 40}
    for changes, message in (
        ({"norm_first": True}, "norm_first"),
        ({"disable_nsp": True}, "disable_nsp"),
        ({"embeddings_scale": 2.0}, "embeddings_scale"),
        ({"mup_base_hidden_size": 8, "mup_base_filter_size": 8}, "logits_scale"),
    ):
        model = build_model(BertConfig.model_validate({**sizes, **changes}))
        with pytest.raises(ConfigError, match=message):
            export_hf(model.named_parameters(), model.config, tmp_path / "out")


@pytest.mark.parametrize(("own", "expected"), [(0.0, 0.0), (0.3, 0.3), (None, 0.2)])
def test_the_dropout_of_a_classifier_is_its_own_or_that_of_hidden_states(own, expected):
    theirs = transformers.BertConfig(**{**_SIZES, "hidden_dropout_prob": 0.2, "classifier_dropout": own})
    hf = {**theirs.to_dict(), "architectures": ["BertForSequenceClassification"]}
    assert BERT_CLASSIFIER.section(hf)["task_dropout"] == expected
