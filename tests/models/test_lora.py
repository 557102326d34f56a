"""Low-rank adapters compared with merged weights in transformers, and gradients with their formula."""

import pytest
import torch

from headwater.config.models.decoder import DecoderConfig
from headwater.convert.checkpoint import export_hf, import_hf
from headwater.core.errors import ConfigError
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
LORA = {
    "r": 3,
    "alpha": 6.0,
    "target_modules": ["proj_q_dense_layer", "proj_v_dense_layer", "*ffn.0.linear_layer"],
}


@pytest.fixture
def models(tmp_path):
    """Return a model of transformers, and ours with its weights and with adapters that are not zero."""
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    theirs.save_pretrained(tmp_path / "theirs")
    config, tensors = import_hf(tmp_path / "theirs")
    section = config.model_dump(exclude_unset=True) | {"name": "llama", "lora_params": LORA}
    ours = build_model(DecoderConfig.model_validate(section))
    missing = ours.load_state_dict(dict(tensors), strict=False)
    assert not missing.unexpected_keys
    assert all("lora" in name for name in missing.missing_keys)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if name.endswith("lora_b"):
                assert not parameter.any(), "a new adapter adds zero"
                parameter.normal_(std=0.1)
    return theirs, ours, tmp_path


def batch():
    tokens = torch.randint(0, 61, (2, 17), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:], "attention_mask": torch.ones(2, 16)}


def test_only_adapters_are_trained(models):
    ours = models[1]
    trained = {name: tuple(p.shape) for name, p in ours.named_parameters() if p.requires_grad}
    of_block = {
        "attention.qkv.lora_a": (6, 32),
        "attention.qkv.lora_b": (48, 3),
        "ffn.input.lora_a": (3, 32),
        "ffn.input.lora_b": (48, 3),
    }
    assert trained == {f"blocks.{i}.{name}": shape for i in range(2) for name, shape in of_block.items()}


def test_merged_export_computes_the_same(models):
    theirs, ours, folder = models
    export_hf(dict(ours.state_dict()), ours.config, folder / "merged")
    merged = transformers.LlamaForCausalLM.from_pretrained(folder / "merged")
    ids = batch()["input_ids"]
    torch.testing.assert_close(ours.eval().logits(ids), merged(ids).logits, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(merged(ids).logits, theirs(ids).logits, atol=1e-2)
    key = "model.layers.0.self_attn.k_proj.weight"
    assert torch.equal(merged.state_dict()[key], theirs.state_dict()[key])


def test_adapters_on_every_layer_are_merged(tmp_path):
    section = {"name": "llama", "hidden_size": 32, "num_heads": 4, "num_hidden_layers": 1, "vocab_size": 61}
    sizes = {
        "filter_size": 48,
        "max_position_embeddings": 16,
        "lora_params": {"r": 2, "target_modules": ["*"]},
    }
    model = build_model(DecoderConfig.model_validate(section | sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    export_hf(dict(model.state_dict()), model.config, tmp_path / "merged")
    merged = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    ids = batch()["input_ids"]
    torch.testing.assert_close(model.eval().logits(ids), merged(ids).logits, rtol=1e-3, atol=1e-4)


def test_gradients_equal_the_formula(models):
    """By the chain rule for W + s·B·A, the gradients are s·Bᵀ·dW for A and s·dW·Aᵀ for B."""
    _, ours, folder = models
    export_hf(dict(ours.state_dict()), ours.config, folder / "merged")
    merged = transformers.LlamaForCausalLM.from_pretrained(folder / "merged")
    tokens = torch.cat([batch()["input_ids"], batch()["labels"][:, -1:]], 1)
    merged(tokens, labels=tokens).loss.backward()
    ours(batch()).backward()
    layer, attention = ours.blocks[1].attention.qkv, merged.model.layers[1].self_attn
    assert layer.weight.grad is None
    for part, (a, b, gradient) in enumerate(
        zip(
            layer.lora_a.chunk(2),
            layer.lora_b.split([32, 16]),
            (attention.q_proj.weight.grad, attention.v_proj.weight.grad),
            strict=True,
        )
    ):
        of_a = layer.lora_a.grad.chunk(2)[part]
        of_b = layer.lora_b.grad.split([32, 16])[part]
        torch.testing.assert_close(of_a, 2 * b.T @ gradient, rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(of_b, 2 * gradient @ a.T, rtol=1e-3, atol=1e-6)
        assert of_a.abs().max() > 1e-5


def test_missing_layers_are_refused():
    section = {"name": "llama", "hidden_size": 32, "num_heads": 4, "num_hidden_layers": 1, "vocab_size": 61}
    config = DecoderConfig.model_validate(section | {"lora_params": {"r": 2, "target_modules": ["c_attn"]}})
    with pytest.raises(ConfigError, match="c_attn matches no linear layer of this model"):
        build_model(config, device="meta")


def peft_model(library, targets):
    """Return the library's model with adapters that are not zero."""
    import peft

    adapted = peft.get_peft_model(library, peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return adapted


def common(**sizes):
    return {"vocab_size": 61, **sizes}


LIBRARY = {
    "split": (
        lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
        ["q_proj", "v_proj", "down_proj"],
    ),
    "all split": (
        lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"],
    ),
    "fused and transposed": (
        lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(**common(n_embd=32, n_layer=2, n_head=4, n_positions=16))
        ),
        ["c_attn", "c_fc"],
    ),
    "fused and interleaved": (
        lambda: transformers.GPTNeoXForCausalLM(
            transformers.GPTNeoXConfig(
                **common(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
            )
        ),
        ["query_key_value", "dense"],
    ),
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:fan_in_fan_out:UserWarning")
@pytest.mark.parametrize("kind", LIBRARY)
def test_library_names_adapt_the_same_matrices_as_peft(kind, tmp_path):
    """PEFT's adapters are loaded into our model; their names follow from the rules of the format."""
    pytest.importorskip("peft")
    build, targets = LIBRARY[kind]
    torch.manual_seed(0)
    library = build()
    library.save_pretrained(tmp_path)
    config, tensors = import_hf(tmp_path)
    lora = {"r": 3, "alpha": 6.0, "target_modules": targets}
    section = config.model_dump(exclude_unset=True) | {"name": config.name, "lora_params": lora}
    ours = build_model(DecoderConfig.model_validate(section)).eval()
    ours.load_state_dict(dict(tensors), strict=False)
    adapted = peft_model(library, targets).eval()
    layers = {name.rpartition(".lora_a")[0] for name, _ in ours.named_parameters() if "lora_a" in name}
    assert len([n for n, _ in adapted.named_parameters() if "lora_A" in n]) == sum(
        len(ours.get_submodule(layer).rows) for layer in layers
    )
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = dict(import_hf(tmp_path / "merged")[1])
    before = dict(ours.named_parameters())
    with torch.no_grad():
        for layer in layers:
            # The update of each part has rank 3, so that its factors of this rank are exact.
            module = ours.get_submodule(layer)
            update = merged[f"{layer}.weight"] - before[f"{layer}.weight"]
            untouched = torch.ones(len(update), dtype=torch.bool)
            for index, rows in enumerate(module.rows):
                untouched[rows] = False
                left, values, right = torch.linalg.svd(update[rows] / module.scale)
                assert values[3:].max() < 1e-5 < values[2]
                start = sum(module.sizes[:index])
                module.lora_a[3 * index : 3 * index + 3] = right[:3]
                module.lora_b[start : start + module.sizes[index]] = left[:, :3] * values[:3]
            assert not update[untouched].any()
    ids = batch()["input_ids"]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(ours.logits(ids), theirs(ids).logits, rtol=1e-4, atol=1e-4)
    export_hf(dict(ours.state_dict()), ours.config, tmp_path / "exported")
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported").state_dict()
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(exported[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "target", "names"),
    [("gpt2", "q_proj", "c_attn, c_proj, c_fc"), ("llama", "v_prj", "q_proj, k_proj, v_proj, proj_output")],
)
def test_error_for_an_unknown_layer_lists_the_names_of_the_family(family, target, names):
    lora = {"r": 2, "target_modules": [target, "proj_k_dense_layer"]}
    section = {"name": family, "hidden_size": 32, "num_heads": 4, "num_hidden_layers": 1, "vocab_size": 61}
    with pytest.raises(ConfigError, match=f"{target} matches no linear layer") as caught:
        build_model(DecoderConfig.model_validate(section | {"lora_params": lora}))
    for name in names.split(", "):
        assert name in caught.value.remedy


def test_library_names_equal_the_converters():
    from headwater.convert.formats import FORMATS
    from headwater.models.library_names import LIBRARY_LAYERS

    checked = 0
    for format in FORMATS:
        for family in (name for name in format.models if name in LIBRARY_LAYERS):
            size = {"hidden_size": 64, "num_heads": 1, "num_hidden_layers": 1, "vocab_size": 61}
            extra = {"moe": {"num_experts": 2, "top_k": 1}} if family == "mixtral" else {}
            config = DecoderConfig.model_validate({"name": family, **size, **extra})
            stored = {rule.ours: rule.theirs for rule in format.rules(config)}
            block, layers = LIBRARY_LAYERS[family]
            for ours, theirs in layers.items():
                names = tuple(f"{block}.{{}}.{name}.weight" for name in theirs)
                assert stored[f"blocks.{{}}.{ours}.weight"] == names, (family, ours)
                checked += 1
    assert checked > 40
