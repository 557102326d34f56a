"""The decoder compared with transformers' GPT-2 and plain PyTorch."""

import math

import pytest
import torch
from torch.nn import functional as F

from headwater.config.models.decoder import FAMILIES as DECODERS
from headwater.core.errors import DataError
from headwater.models.decoder import Decoder
from headwater.models.decoder_parameters import init_parameter, learning_rate_scale
from headwater.models.loss import WORKSPACES
from headwater.models.registry import FAMILIES, build_model

transformers = pytest.importorskip("transformers")
Conv1D = transformers.pytorch_utils.Conv1D


def their_model(model):
    """Return transformers' GPT-2 with the weights of `model`, copied here without our converter."""
    config = model.config
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=config.vocab_size,
            n_embd=config.hidden_size,
            n_layer=config.num_hidden_layers,
            n_head=config.num_heads,
            n_positions=config.max_position_embeddings,
            n_inner=config.ffn_size,
            activation_function=config.nonlinearity,
            layer_norm_epsilon=config.layer_norm_epsilon,
            scale_attn_weights=config.attention_type == "scaled_dot_product",
            tie_word_embeddings=config.share_embedding_weights,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    with torch.no_grad():
        for ours, other, transposed in parameter_pairs(model, theirs):
            other.copy_(ours.t() if transposed else ours)
    return theirs


def parameter_pairs(model, theirs):
    """Yield our parameter, theirs, and True if theirs is transposed."""
    decoder = theirs.transformer
    modules = [
        (model.embedding, decoder.wte),
        (model.position_embedding, decoder.wpe),
        (model.norm, decoder.ln_f),
    ]
    for block, their_block in zip(model.blocks, decoder.h, strict=True):
        modules += [
            (block.attention_norm, their_block.ln_1),
            (block.attention.qkv, their_block.attn.c_attn),
            (block.attention.output, their_block.attn.c_proj),
            (block.ffn_norm, their_block.ln_2),
            (block.ffn.input, their_block.mlp.c_fc),
            (block.ffn.output, their_block.mlp.c_proj),
        ]
    if not model.config.share_embedding_weights:
        modules.append((model.head, theirs.lm_head))
    return [
        (getattr(ours, name), getattr(other, name), name == "weight" and isinstance(other, Conv1D))
        for ours, other in modules
        for name in ("weight", "bias")
        if getattr(ours, name, None) is not None
    ]


def scrambled(model):
    """Return the model with random biases and norms instead of 0 and 1."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


VARIANTS = [
    {},
    {"share_embedding_weights": False},
    {"nonlinearity": "gelu_new", "filter_size": 48, "layer_norm_epsilon": 1e-3},
    {"nonlinearity": "relu", "num_heads": 1, "attention_type": "dot_product"},
    {"nonlinearity": "silu", "num_hidden_layers": 1, "hidden_size": 40},
    {"nonlinearity": "tanh", "name": "gpt3"},
]


@pytest.mark.parametrize("changes", VARIANTS)
def test_loss_and_gradients_equal_transformers(tiny, batch, changes):
    model = scrambled(Decoder(tiny(**changes)))
    theirs = their_model(model)
    loss = model(batch)
    loss.backward()
    logits = theirs(batch["input_ids"].long()).logits
    mask = batch["attention_mask"]
    losses = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten().long(), reduction="none")
    expected = (losses * mask.flatten()).sum() / mask.sum()
    expected.backward()
    torch.testing.assert_close(model.logits(batch["input_ids"]), logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for ours, other, transposed in parameter_pairs(model, theirs):
        torch.testing.assert_close(
            ours.grad, other.grad.t() if transposed else other.grad, rtol=1e-4, atol=1e-6
        )


def test_loss_scaling_by_batch_size(tiny, batch):
    weighted = Decoder(tiny(loss_scaling="batch_size", loss_weight=0.125))
    mean = Decoder(tiny())
    tokens = batch["attention_mask"].sum()
    torch.testing.assert_close(weighted(batch), mean(batch) * tokens / 4 * 0.125)


def test_batch_without_labels_has_loss_zero(tiny, batch):
    batch["attention_mask"].zero_()
    model = Decoder(tiny())
    loss = model(batch)
    loss.backward()
    assert loss == 0
    assert not any(parameter.grad.any() for parameter in model.parameters())


def test_mask_hides_labels_but_not_tokens(tiny, batch):
    model = Decoder(tiny())
    full = {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])}
    assert model(batch) != model(full)
    changed = {**batch, "labels": torch.where(batch["attention_mask"].bool(), batch["labels"], 0)}
    assert torch.equal(model(batch), model(changed))


def test_mup_scales_embeddings_and_logits(tiny, batch):
    plain = Decoder(tiny())
    scaled = Decoder(tiny(embeddings_scale=10.0))
    scaled.load_state_dict(plain.state_dict())
    with torch.no_grad():
        plain.embedding.weight *= 10
        plain.position_embedding.weight *= 10
    plain.head.weight = torch.nn.Parameter(scaled.head.weight.detach())
    torch.testing.assert_close(scaled.logits(batch["input_ids"]), plain.logits(batch["input_ids"]))

    mup = Decoder(tiny(mup_base_hidden_size=8, mup_base_filter_size=32, use_bias_in_output=True))
    with torch.no_grad():
        mup.head.bias.normal_()
    logits = mup.logits(batch["input_ids"])
    unscaled = F.linear(mup.hidden(batch["input_ids"]), mup.head.weight, mup.head.bias)
    torch.testing.assert_close(logits, unscaled / 4)
    full = {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])}
    expected = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten().long())
    torch.testing.assert_close(mup(full), expected)


def test_biases_can_be_left_out(tiny, batch):
    model = Decoder(
        tiny(use_projection_bias_in_attention=False, use_ffn_bias_in_attention=False, use_ffn_bias=False)
    )
    assert not [name for name, _ in model.named_parameters() if "bias" in name and "norm" not in name]
    model(batch).backward()


def test_every_parameter_is_held_by_a_leaf_module(tiny):
    for name, module in Decoder(tiny(share_embedding_weights=False, use_bias_in_output=True)).named_modules():
        if list(module.children()):
            assert not list(module.parameters(recurse=False)), name


def test_tied_weights_are_one_parameter(tiny, batch):
    model = Decoder(tiny())
    assert model.head.weight is model.embedding.weight
    assert "head.weight" not in dict(model.named_parameters())
    untied = Decoder(tiny(share_embedding_weights=False))
    assert untied.head.weight is not untied.embedding.weight


def test_loss_of_a_model_uses_the_workspace_pool(tiny, batch):
    WORKSPACES.clear()
    Decoder(tiny())(batch)
    assert WORKSPACES.idle_bytes == 4 * 80 * 128  # 80 tokens, 97 words padded to 128


def test_sequence_longer_than_the_positions_is_refused(tiny):
    with pytest.raises(DataError, match="at most 24 tokens, got 25"):
        Decoder(tiny()).logits(torch.zeros(1, 25, dtype=torch.int64))


@pytest.mark.parametrize("autocast", [True, False])
def test_bf16_weights_keep_a_bf16_residual_stream(tiny, batch, autocast):
    model = Decoder(tiny()).to(torch.bfloat16)
    for name, module in model.named_modules():
        if name.endswith("norm"):
            module.float()
    dtypes = []
    for module in [*model.blocks, model.norm]:
        module.register_forward_hook(lambda module, args, output: dtypes.append(output[0].dtype))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(batch)
    loss.backward()
    assert set(dtypes) == {torch.bfloat16}
    assert loss.dtype == torch.float32
    assert all(p.grad.dtype == p.dtype and p.grad.any() for p in model.parameters())
    assert abs(loss - Decoder(tiny())(batch)) < 0.05


def test_dropout_acts_in_training_only(tiny, batch):
    model = Decoder(tiny(dropout_rate=0.5))
    assert model(batch) != model(batch)
    model.eval()
    assert torch.equal(model(batch), model(batch))
    only_attention = Decoder(tiny(dropout_rate=0.0, attention_dropout_rate=0.5))
    assert only_attention(batch) != only_attention(batch)


def test_meta_construction_takes_no_memory_and_no_random_numbers(tiny):
    state = torch.get_rng_state()
    model = build_model(tiny(), device="meta")
    assert all(parameter.is_meta for parameter in model.parameters())
    build_model(tiny())
    assert torch.equal(torch.get_rng_state(), state)


def test_stage_by_stage_initialisation_equals_the_whole(tiny):
    config = tiny()
    model = build_model(config, seed=3)
    for name, parameter in reversed(list(build_model(config, device="meta").named_parameters())):
        value = init_parameter(name, parameter.shape, config, 3)
        assert torch.equal(value, model.get_parameter(name)), name
    other = dict(build_model(config, seed=4).named_parameters())
    same = [name for name, p in model.named_parameters() if torch.equal(p, other[name])]
    assert all(name.endswith("bias") or "norm" in name for name in same)


def test_all_parameters_have_different_initial_values(tiny):
    config = tiny(hidden_size=64, filter_size=64, num_hidden_layers=2)
    matrices = [p.flatten()[:64] for p in build_model(config).parameters() if p.dim() == 2]
    assert len({tuple(m.tolist()) for m in matrices}) == len(matrices)


def test_weights_have_the_spread_of_their_initializers(tiny):
    def truncated(std):
        return {"name": "truncated_normal", "std": std, "a": -2 * std, "b": 2 * std}

    config = tiny(
        hidden_size=128,
        num_hidden_layers=2,
        initializer=truncated(0.02),
        embedding_initializer=truncated(0.1),
        output_layer_initializer=truncated(0.005),
        share_embedding_weights=False,
    )
    shrink = 0.8796  # standard deviation of a unit normal cut at two
    for name, parameter in build_model(config).named_parameters():
        if parameter.dim() == 1:
            expected = 1.0 if name.endswith("norm.weight") else 0.0
            assert parameter.eq(expected).all(), name
            continue
        std = 0.1 if "embedding" in name else 0.005 if ".output." in name else 0.02
        assert parameter.abs().max() <= 2 * std, name
        assert math.isclose(parameter.std().item(), std * shrink, rel_tol=0.05), name
        assert abs(parameter.mean()) < std / 10, name


def test_xavier_uses_the_fans_of_query_key_and_value(tiny):
    config = tiny(hidden_size=64, initializer={"name": "xavier_uniform"})
    weight = build_model(config).blocks[0].attention.qkv.weight
    bound = math.sqrt(6 / (64 + 64))
    assert 0.98 * bound < weight.abs().max() <= bound


def test_every_name_in_the_registry_builds(tiny, batch):
    for name in DECODERS:
        config = tiny(name=name, rotary_dim=4)
        assert FAMILIES[name].model is Decoder
        assert torch.isfinite(build_model(config)(batch))


def test_runs_on_fake_tensors(tiny, batch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        model = build_model(tiny())
        loss = model({name: mode.from_tensor(tensor) for name, tensor in batch.items()})
        loss.backward()
        assert loss.shape == ()
        assert all(parameter.grad.shape == parameter.shape for parameter in model.parameters())
    assert torch.isfinite(build_model(tiny())(batch))


def test_mup_scales_learning_rates_of_hidden_matrices_only(tiny):
    config = tiny(mup_base_hidden_size=8, mup_base_filter_size=32)
    scales = {name: learning_rate_scale(name, config) for name, _ in Decoder(config).named_parameters()}
    slowed = {name for name, scale in scales.items() if scale != 1}
    assert slowed == {
        n for n in scales if n.startswith("blocks.") and n.endswith("weight") and "norm" not in n
    }
    assert scales["blocks.0.attention.qkv.weight"] == 8 / config.hidden_size
    assert scales["blocks.0.ffn.output.weight"] == 32 / config.ffn_size
    assert {learning_rate_scale(name, tiny()) for name in scales} == {1.0}
