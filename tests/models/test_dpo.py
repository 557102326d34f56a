"""Preference losses compared with the formulas of the papers on a model of transformers."""

import pytest
import torch
from torch.nn import functional as F

from headwater.config.models.preference import DPOConfig
from headwater.convert.checkpoint import import_hf
from headwater.models.registry import build_model

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}


def pairs():
    """Return three pairs, with prompts and answers of different lengths."""
    generator = torch.Generator().manual_seed(0)
    batch = {}
    for side in ("chosen", "rejected"):
        ids = torch.randint(0, 61, (3, 16), generator=generator)
        labels = ids.clone()
        for row, (begin, end) in enumerate([(4, 16), (7, 12), (2, 9)]):
            labels[row, :begin] = labels[row, end:] = -100
        batch |= {f"{side}_input_ids": ids, f"{side}_labels": labels}
    return batch


def likelihoods(model, batch, side):
    """Return the summed log-probabilities of an answer, and its length, as defined in the papers."""
    ids, labels = batch[f"{side}_input_ids"], batch[f"{side}_labels"]
    log_probabilities = F.log_softmax(model(ids).logits, -1)
    of_token = log_probabilities[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    counted = labels[:, 1:] != -100
    return (of_token * counted).sum(-1), counted.sum(-1)


def expected_loss(policy, reference, batch, loss_type, beta):
    gains = []
    for side in ("chosen", "rejected"):
        ours, length = likelihoods(policy, batch, side)
        theirs = likelihoods(reference, batch, side)[0].detach() if reference else 0
        gains.append((ours - theirs) / (length if loss_type == "ipo" else 1))
    margin = gains[0] - gains[1]
    return {
        "sigmoid": lambda: -torch.log(torch.sigmoid(beta * margin)),
        "hinge": lambda: torch.clamp(1 - beta * margin, min=0),
        "ipo": lambda: (margin - 1 / (2 * beta)) ** 2,
    }[loss_type]().mean()


def models(folder, loss_type, reference_free=False):
    """Return a policy and a reference of transformers, and ours with the same weights."""
    theirs = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        theirs.append(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)))
    state = {}
    for role, model in zip(("policy", "reference"), theirs, strict=True):
        model.save_pretrained(folder / role)
        config, tensors = import_hf(folder / role)
        state |= {f"{role}.{name}": tensor for name, tensor in tensors}
    section = {"loss_type": loss_type, "beta": 0.3, "reference_free": reference_free}
    ours = build_model(DPOConfig(name="dpo", policy_model=config, dpo=section))
    if reference_free:
        state = {name: value for name, value in state.items() if name.startswith("policy")}
        theirs[1] = None
    ours.load_state_dict(state)
    return *theirs, ours


@pytest.mark.parametrize("reference_free", [False, True])
@pytest.mark.parametrize("loss_type", ["sigmoid", "hinge", "ipo"])
def test_loss_and_gradients_equal_the_formula(loss_type, reference_free, tmp_path):
    policy, reference, ours = models(tmp_path, loss_type, reference_free)
    expected = expected_loss(policy, reference, pairs(), loss_type, 0.3)
    expected.backward()
    loss = ours(pairs())
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.policy.head.weight.grad, policy.lm_head.weight.grad, rtol=1e-3, atol=1e-6)
    embedding = policy.model.embed_tokens.weight.grad
    assert embedding.abs().max() > 1e-3
    torch.testing.assert_close(ours.policy.embedding.weight.grad, embedding, rtol=1e-3, atol=1e-6)
    assert all(p.grad is None for name, p in ours.named_parameters() if name.startswith("reference"))


def test_policy_and_reference_start_equal():
    section = {"name": "llama", "vocab_size": 61, "hidden_size": 32, "num_heads": 4, "num_hidden_layers": 2}
    policy = section | {"max_position_embeddings": 16, "filter_size": 48, "dropout_rate": 0.5}
    model = build_model(DPOConfig.model_validate({"name": "dpo", "policy_model": policy}))
    assert torch.equal(model.policy.head.weight, model.reference.head.weight)
    assert model.train()(pairs()).item() == pytest.approx(0.6931, abs=1e-4)  # without dropout
    model.eval()(pairs())
    assert model.scored["accuracy"].compute() == 0.0


def test_experts_are_refused():
    policy = {"name": "mixtral", "vocab_size": 61, "hidden_size": 32, "num_heads": 4, "num_hidden_layers": 2}
    with pytest.raises(ValueError, match="experts"):
        DPOConfig.model_validate(
            {"name": "dpo", "policy_model": policy | {"moe": {"num_experts": 4, "top_k": 2}}}
        )
