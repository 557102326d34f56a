"""The two encoders of DPR compared with transformers: scores, losses, and bit-exact round trips."""

import copy
import json

import pytest
import torch
from conversions import losses_of_a_step, stored

from headwater.convert.checkpoint import export_hf, import_hf
from headwater.convert.formats import CONVERTERS
from headwater.core.errors import CheckpointError, ConfigError
from headwater.models.registry import build_model

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 24,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
TOWERS = {
    "question_encoder": (transformers.DPRQuestionEncoder, {}),
    "ctx_encoder": (transformers.DPRContextEncoder, {"num_hidden_layers": 3, "hidden_act": "relu"}),
}


@pytest.fixture
def towers(tmp_path):
    """Save the two encoders with transformers; every parameter is random."""
    torch.manual_seed(3)
    models = []
    for name, (kind, changes) in TOWERS.items():
        model = kind(transformers.DPRConfig(**{**SIZES, **changes})).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.2 * torch.randn_like(parameter)
        model.save_pretrained(tmp_path / "theirs" / name, max_shard_size="20KB")
        models.append(model)
    return models


def loaded(folder):
    config, tensors = import_hf(folder)
    model = build_model(config).eval()
    model.load_state_dict(dict(tensors))
    return model


def texts(rows, seed):
    """Return texts; the last one is padded."""
    ids = torch.randint(1, 61, (rows, 12), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[-1, 7:] = 0
    return {
        "input_ids": ids * mask,
        "attention_mask": mask,
        "token_type_ids": (torch.arange(12) > 5).long().expand(rows, 12),
    }


def scores(towers, questions, passages):
    """Return the score of every passage for every question."""
    return towers[0](**questions).pooler_output @ towers[1](**passages).pooler_output.mT


def batch_of(questions, passages):
    """Return two questions with two passages each."""
    return {f"questions_{name}": value for name, value in questions.items()} | {
        f"ctx_{name}": value.reshape(2, 2, 12) for name, value in passages.items()
    }


def test_scores_equal_transformers(towers, tmp_path):
    questions, passages = texts(2, 0), texts(4, 1)
    with torch.no_grad():
        ours = loaded(tmp_path / "theirs").scores(batch_of(questions, passages))
        torch.testing.assert_close(ours, scores(towers, questions, passages), rtol=1e-5, atol=1e-5)


def test_an_export_of_an_import_has_the_same_bits_and_loads(towers, tmp_path):
    model = loaded(tmp_path / "theirs")
    export_hf(model.named_parameters(), model.config, tmp_path / "ours", max_shard_bytes=20_000)
    for tower, (name, (kind, _)) in zip(towers, TOWERS.items(), strict=True):
        assert len(list((tmp_path / "ours" / name).glob("*.safetensors"))) > 1
        before, after = (stored(tmp_path / folder / name) for folder in ("theirs", "ours"))
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)
        again, info = kind.from_pretrained(tmp_path / "ours" / name, output_loading_info=True)
        assert not any(info[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        with torch.no_grad():
            text = texts(3, 2)
            assert torch.equal(again.eval()(**text).pooler_output, tower(**text).pooler_output)


def test_training_step_has_the_same_loss(towers, tmp_path):
    ours, theirs = loaded(tmp_path / "theirs"), torch.nn.ModuleList(copy.deepcopy(towers))
    questions, passages = texts(2, 0), texts(4, 1)
    losses = []
    for module, loss in (
        (ours, lambda: ours(batch_of(questions, passages))),
        (
            theirs,
            lambda: torch.nn.functional.cross_entropy(
                scores(theirs, questions, passages), torch.tensor([0, 2])
            ),
        ),
    ):
        losses.append(losses_of_a_step(module, loss, learning_rate=1e-4))
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
    assert losses[0][1] < losses[0][0]


def test_encoder_published_with_a_pooler_is_imported(towers, tmp_path):
    from safetensors.torch import save_file

    for name, (kind, _) in TOWERS.items():
        del kind
        folder = tmp_path / "theirs" / name
        tensors = stored(folder)
        for path in folder.glob("model*"):
            path.unlink()
        tensors[f"{name}.bert_model.pooler.dense.weight"] = torch.zeros(32, 32)
        tensors[f"{name}.bert_model.embeddings.position_ids"] = torch.arange(24)
        save_file(tensors, folder / "model.safetensors")
    assert loaded(tmp_path / "theirs").config.ctx_encoder.num_hidden_layers == 3


def test_unsuitable_checkpoints_are_refused(towers, tmp_path):
    folder = tmp_path / "theirs"
    with pytest.raises(ConfigError, match=r"(?s)two encoders, got one.*question_encoder and ctx_encoder"):
        import_hf(folder / "question_encoder")
    with pytest.raises(ConfigError, match=r"(?s)DPRQuestionEncoder and DPRContextEncoder.*--model dpr"):
        import_hf(folder, format=CONVERTERS["bert"][0])
    config = folder / "ctx_encoder" / "config.json"
    content = json.loads(config.read_text())
    config.write_text(json.dumps(content | {"projection_dim": 8}))
    with pytest.raises(ConfigError, match="projection_dim to be 0, got 8"):
        import_hf(folder)
    config.unlink()
    with pytest.raises(ConfigError, match=r"config\.json"):
        import_hf(folder)
    config.write_text(json.dumps(content))
    (folder / "question_encoder").rename(folder / "x")
    (folder / "ctx_encoder").rename(folder / "question_encoder")
    (folder / "x").rename(folder / "ctx_encoder")
    with pytest.raises(CheckpointError, match="does not belong to this model"):
        dict(import_hf(folder)[1])
