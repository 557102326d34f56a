"""Checkpoints in Hugging Face's format, both ways, against the transformers library."""

import contextlib
import copy
import json
import os
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from headwater.api.pretrained import load_pretrained, save_pretrained  # noqa: E402
from headwater.core.empty import empty_parameters, fill_parameters, initial_values  # noqa: E402
from headwater.core.errors import CheckpointError, ConfigError, DiskFullError  # noqa: E402
from headwater.core.lazy import LazyTensor  # noqa: E402

TINY = {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, **TINY)
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**LLAMA),
    "llama_tied": lambda: transformers.LlamaConfig(tie_word_embeddings=True, **LLAMA),
    "gpt2": lambda: transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=32, **TINY),
    "bert": lambda: transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, **TINY
    ),
    "t5": lambda: transformers.T5Config(
        d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0, **TINY
    ),
    "mixtral": lambda: transformers.MixtralConfig(num_local_experts=3, num_key_value_heads=2, **LLAMA),
}
AUTO = {"bert": "AutoModelForMaskedLM", "t5": "AutoModelForSeq2SeqLM"}


def auto_class(kind):
    return getattr(transformers, AUTO.get(kind, "AutoModelForCausalLM"))


def make_model(kind, seed):
    torch.manual_seed(seed)
    return auto_class(kind).from_config(CONFIGS[kind]()).eval()


def make_empty(kind):
    with empty_parameters():
        model = auto_class(kind).from_config(CONFIGS[kind]()).eval()
    assert all(param.is_meta for param in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    return model


@torch.no_grad()
def logits_of(model):
    tokens = torch.arange(24).view(2, 12) * 7 % 90 + 3
    inputs = {"decoder_input_ids": tokens[:, :5]} if model.config.is_encoder_decoder else {}
    return model(input_ids=tokens, **inputs).logits


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Return a function that saves a model with transformers and returns (folder, loaded model)."""
    made = {}

    def get(kind, sharded=True):
        if (kind, sharded) not in made:
            folder = tmp_path_factory.mktemp(kind)
            make_model(kind, 0).save_pretrained(folder, max_shard_size="20KB" if sharded else "1GB")
            assert (folder / "model.safetensors.index.json").exists() == sharded
            made[kind, sharded] = folder, auto_class(kind).from_pretrained(folder).eval()
        return made[kind, sharded]

    return get


def contents(folder):
    """Return every JSON file and every tensor in a folder, by name."""
    found = {path.name: json.loads(path.read_text()) for path in folder.glob("*.json")}
    for path in folder.glob("*.safetensors"):
        found |= safetensors.torch.load_file(path)
    return found


kinds = pytest.mark.parametrize("kind", CONFIGS)
shardings = pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "single"])


@kinds
@shardings
def test_weights_load_as_transformers_loads_them(checkpoints, kind, sharded):
    folder, theirs = checkpoints(kind, sharded)
    model = make_model(kind, 1)
    report = load_pretrained(model, folder)
    assert report.missing == report.unexpected == ()
    assert torch.equal(logits_of(model), logits_of(theirs))


@kinds
@shardings
def test_loads_into_empty_parameters(checkpoints, kind, sharded):
    folder, theirs = checkpoints(kind, sharded)
    model = make_empty(kind)
    params = list(model.parameters())
    load_pretrained(model, folder)
    assert all(param.is_meta for param in model.parameters())
    expected = dict(theirs.named_parameters())
    values = initial_values(model)
    assert values.keys() == expected.keys()
    for name, read in values.items():
        assert torch.equal(read(), expected[name]), name
    fill_parameters(model)
    assert all(one is other for one, other in zip(params, model.parameters(), strict=True))
    assert initial_values(model) == {}
    assert torch.equal(logits_of(model), logits_of(theirs))


@kinds
@shardings
def test_transformers_loads_saved_folders(tmp_path, kind, sharded):
    model = make_model(kind, 2)
    size = "20KB" if sharded else "1GB"
    save_pretrained(model, tmp_path / "ours", max_shard_size=size)
    loaded, info = auto_class(kind).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values())
    assert torch.equal(logits_of(loaded.eval()), logits_of(model))

    model.save_pretrained(tmp_path / "theirs", max_shard_size=size)
    ours, theirs = (contents(tmp_path / who) for who in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    for name, content in ours.items():
        if not isinstance(content, torch.Tensor):
            # transformers counts the shared memory of tensors that it has split: other cuts
            assert content == theirs[name] or (kind == "mixtral" and "index" in name), name
        else:
            assert torch.equal(content, theirs[name]), name


@kinds
def test_empty_model_is_saved_without_being_filled(checkpoints, tmp_path, kind):
    folder, theirs = checkpoints(kind)
    model = make_empty(kind)
    load_pretrained(model, folder)
    save_pretrained(model, tmp_path, max_shard_size="20KB")
    assert all(param.is_meta for param in model.parameters())
    assert torch.equal(logits_of(auto_class(kind).from_pretrained(tmp_path).eval()), logits_of(theirs))


@pytest.mark.parametrize(
    "kind, base",
    [("gpt2", "GPT2Model"), ("llama", "LlamaModel"), ("bert", "BertModel"), ("t5", "T5EncoderModel")],
)
def test_prefix_of_the_base_model(checkpoints, tmp_path, kind, base):
    """A checkpoint of the whole model loads into the base model, and one of the base into the whole model."""
    folder, _ = checkpoints(kind)
    base_class = getattr(transformers, base)
    expected = dict(base_class.from_pretrained(folder).named_parameters())
    model = base_class(CONFIGS[kind]())
    report = load_pretrained(model, folder, strict=False)
    fresh = [name for name in expected if name in report.missing]
    assert all("pooler" in name for name in fresh)
    for name, param in model.named_parameters():
        assert name in fresh or torch.equal(param, expected[name]), name

    model.save_pretrained(tmp_path)
    whole = make_model(kind, 3)
    report = load_pretrained(whole, tmp_path, strict=False)
    _, info = auto_class(kind).from_pretrained(tmp_path, output_loading_info=True)
    assert set(report.missing) == set(info["missing_keys"])
    assert set(report.unexpected) == set(info["unexpected_keys"])
    key = next(name for name in expected if name not in fresh)
    inner = whole if kind == "t5" else whole.base_model
    assert torch.equal(inner.get_parameter(key), model.get_parameter(key))


@pytest.mark.parametrize("empty", [True, False], ids=["empty", "real"])
def test_new_head_on_a_trained_model(checkpoints, empty):
    folder, theirs = checkpoints("bert")
    config = CONFIGS["bert"]()
    config.num_labels = 5
    with empty_parameters() if empty else contextlib.nullcontext():
        model = transformers.BertForSequenceClassification(config)
    with pytest.raises(
        CheckpointError, match=r"lacks .*classifier\.weight.*the model has no cls\.predictions"
    ):
        load_pretrained(model, folder)
    report = load_pretrained(model, folder, strict=False)
    assert {"classifier.weight", "classifier.bias"} < set(report.missing)
    fill_parameters(model)
    assert torch.equal(model.bert.embeddings.word_embeddings.weight, theirs.get_input_embeddings().weight)
    assert model.classifier.weight.std().item() == pytest.approx(config.initializer_range, rel=0.5)
    assert torch.equal(model.classifier.bias, torch.zeros(5))


def test_new_head_whose_rule_belongs_to_the_module_around_it(tmp_path):
    """In T5 the module that holds the two layers of the head initialises them, and not these layers."""
    config = transformers.T5Config(
        vocab_size=50, d_model=256, d_kv=4, d_ff=32, num_layers=1, num_heads=2, num_labels=3
    )
    transformers.T5Model(config).save_pretrained(tmp_path)
    theirs = transformers.T5ForSequenceClassification.from_pretrained(tmp_path)
    with empty_parameters():
        model = transformers.T5ForSequenceClassification(config)
    load_pretrained(model, tmp_path, strict=False)
    fill_parameters(model)
    for name, value in theirs.state_dict().items():
        ours = model.get_parameter(name)
        if name.startswith("classification_head"):
            assert ours.std().item() == pytest.approx(value.std().item(), rel=0.2), name
        else:
            assert torch.equal(ours, value), name


def test_tied_weights_under_any_name(checkpoints, tmp_path):
    folder, theirs = checkpoints("gpt2", sharded=False)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    embedding = tensors.pop("transformer.wte.weight")
    for added in (
        {"lm_head.weight": embedding},
        {"lm_head.weight": embedding, "transformer.wte.weight": embedding.clone()},
    ):
        safetensors.torch.save_file({**tensors, **added}, tmp_path / "model.safetensors")
        model = make_model("gpt2", 1)
        load_pretrained(model, tmp_path)
        assert model.lm_head.weight is model.transformer.wte.weight
        assert torch.equal(logits_of(model), logits_of(theirs))
    differing = {"lm_head.weight": embedding, "transformer.wte.weight": embedding + 1}
    safetensors.torch.save_file({**tensors, **differing}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="differ in the checkpoint"):
        load_pretrained(make_model("gpt2", 1), tmp_path)


def test_weights_are_converted_to_the_dtypes_of_model_and_files(checkpoints, tmp_path):
    folder, theirs = checkpoints("llama")
    model = make_model("llama", 1).to(torch.bfloat16)
    load_pretrained(model, folder)
    assert torch.equal(logits_of(model), logits_of(copy.deepcopy(theirs).to(torch.bfloat16)))
    save_pretrained(theirs, tmp_path, dtype=torch.float16)
    loaded = auto_class("llama").from_pretrained(tmp_path)
    assert loaded.dtype == torch.float16
    assert torch.equal(loaded.lm_head.weight, theirs.lm_head.weight.half())


# other modules


class Net(nn.Module):
    """A model with tied and frozen weights, and with persistent and other buffers."""

    def __init__(self, width=6):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(width)
        self.scale = nn.Parameter(torch.ones(width), requires_grad=False)
        self.register_buffer("table", torch.arange(width) / 3, persistent=False)


def test_any_module(tmp_path):
    model = Net()
    model.norm.running_mean.fill_(3)
    save_pretrained(model, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    with empty_parameters():
        other = Net()
    assert other.first.weight is other.second.weight
    assert [p.requires_grad for p in other.parameters()] == [p.requires_grad for p in model.parameters()]
    assert torch.equal(other.table, model.table)
    load_pretrained(other, tmp_path)
    fill_parameters(other)
    assert other.first.weight is other.second.weight
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


def test_recurrent_layers(tmp_path):
    model = nn.LSTM(4, 6, num_layers=2)
    save_pretrained(model, tmp_path)
    with empty_parameters():
        other = nn.LSTM(4, 6, num_layers=2)
    load_pretrained(other, tmp_path)
    stand_ins = {name: param.detach() for name, param in model.named_parameters()}
    x = torch.randn(3, 2, 4)
    assert torch.equal(torch.func.functional_call(other, stand_ins, x)[0], model(x)[0])
    fill_parameters(other)
    assert torch.equal(other(x)[0], model(x)[0])


def test_one_parameter_registered_in_two_modules():
    with empty_parameters():
        shared = nn.Parameter(torch.ones(3))
        modules = nn.Module(), nn.Module()
        for module in modules:
            module.weight = shared
    assert modules[0].weight is modules[1].weight
    assert modules[0].weight.is_meta
    assert not nn.Linear(2, 2).weight.is_meta


def test_lazy_state_dict(tmp_path, monkeypatch):
    """The `state_dict` of a streamed model is lazy."""
    values = Net().state_dict()
    lazy = {n: LazyTensor.whole(lambda v=v: v, v.shape, v.dtype) for n, v in values.items()}
    model = Net()
    monkeypatch.setattr(model, "state_dict", lambda: lazy)
    save_pretrained(model, tmp_path)
    found = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in values.items())


# errors


def test_another_architecture(checkpoints):
    folder, _ = checkpoints("llama")
    config = CONFIGS["llama"]()
    config.hidden_size = 64
    model = transformers.LlamaForCausalLM(config)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(
        CheckpointError, match=r"lm_head\.weight has shape \[96, 32\], the model's has \[96, 64\]"
    ):
        load_pretrained(model, folder)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_names_that_differ(tmp_path):
    save_pretrained(nn.ModuleDict({"first": nn.Linear(2, 2), "extra": nn.Linear(2, 2)}), tmp_path)
    model = nn.ModuleDict({"furst": nn.Linear(2, 2)})
    expected = (
        r"lacks furst\.bias \(similar there: first\.bias\).*; the model has no extra\.bias, .*strict=False"
    )
    with pytest.raises(CheckpointError, match=f"(?s){expected}"):
        load_pretrained(model, tmp_path)


def test_parameters_without_values_are_refused(tmp_path):
    with empty_parameters():
        model = nn.Module()
        model.token = nn.Parameter(torch.zeros(3))
    safetensors.torch.save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"token: neither the checkpoint nor the model.s init"):
        load_pretrained(model, tmp_path, strict=False)


def test_a_refused_checkpoint_leaves_the_model_unchanged(tmp_path):
    with empty_parameters():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
        model.token = nn.Parameter(torch.zeros(3))
    model[1] = nn.Linear(2, 2)
    before = copy.deepcopy(model[1].state_dict())
    safetensors.torch.save_file({"1.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="token: neither the checkpoint"):
        load_pretrained(model, tmp_path, strict=False)
    assert all(torch.equal(model[1].state_dict()[name], value) for name, value in before.items())
    assert all(param.is_meta for param in (*model[0].parameters(), model.token))
    assert initial_values(model) == {}


def test_initial_values_of_a_parameter_leave_others_of_its_module_alone(tmp_path):
    for saved in ({"weight": torch.ones(2, 2)}, {}):
        model = nn.Linear(2, 2)
        weight = model.weight.detach().clone()
        model.bias = nn.Parameter(torch.empty(2, device="meta"))
        safetensors.torch.save_file(saved, tmp_path / "model.safetensors")
        load_pretrained(model, tmp_path, strict=False)
        assert torch.equal(model.weight, saved.get("weight", weight))
        assert not model.bias.is_meta and model.bias.isfinite().all()


def test_buffers_on_the_meta_device(checkpoints):
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(CONFIGS["llama"]())
    with pytest.raises(CheckpointError, match=r"(?s)inv_freq.*empty_parameters"):
        load_pretrained(model, checkpoints("llama")[0])


def test_what_cannot_be_saved_is_refused_before_a_file_is_written(tmp_path):
    model = nn.Linear(3, 3)
    for dtype in (torch.int32, "bf16"):
        with pytest.raises(ConfigError, match="expected dtype to be a floating-point dtype of torch, got"):
            save_pretrained(model, tmp_path / "new", dtype=dtype)
    model.register_buffer("kept", torch.eye(3).to_sparse())
    with pytest.raises(CheckpointError, match=r"cannot hold kept, a tensor of torch\.sparse_coo"):
        save_pretrained(model, tmp_path / "new")
    assert not list(tmp_path.iterdir())


def test_an_error_says_what_is_at_the_path_of_a_checkpoint(tmp_path):
    (tmp_path / "file").touch()
    for name, found in (
        ("file", "found a file"),
        ("none", "found nothing"),
        (".", "the folder holds neither"),
    ):
        with pytest.raises(CheckpointError, match=found):
            load_pretrained(nn.Linear(3, 3), tmp_path / name)


def test_pickled_weights_run_no_code(tmp_path):
    model = nn.Linear(3, 3)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    other = nn.Linear(3, 3)
    load_pretrained(other, tmp_path)
    assert torch.equal(other.weight, model.weight)
    torch.save({"model": model.state_dict()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="expected a file that holds tensors by name"):
        load_pretrained(other, tmp_path)
    torch.save({"weight": model}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="more than tensors and plain values"):
        load_pretrained(other, tmp_path)


def test_damaged_folders(checkpoints, tmp_path):
    model = make_model("llama", 1)
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        load_pretrained(model, tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{")
    with pytest.raises(CheckpointError, match=r"index cannot be read"):
        load_pretrained(model, tmp_path)
    index.write_text((checkpoints("llama")[0] / index.name).read_text())
    with pytest.raises(CheckpointError, match=r"(?s)missing.*model-0000\d-of-"):
        load_pretrained(model, tmp_path)
    with pytest.raises(CheckpointError, match="no values"):
        save_pretrained(make_empty("llama"), tmp_path / "new")


def test_saving_replaces_the_old_files(checkpoints, tmp_path):
    _, theirs = checkpoints("llama")
    (tmp_path / "tokenizer.json").write_text("{}")
    for size in ("1GB", "20KB", "50KB", "1GB"):
        save_pretrained(theirs, tmp_path, max_shard_size=size)
        loaded = auto_class("llama").from_pretrained(tmp_path).eval()
        assert torch.equal(logits_of(loaded), logits_of(theirs))
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"tokenizer.json", "model.safetensors", "config.json", "generation_config.json"}

    model = make_empty("llama")  # it is read from the folder while the folder is rewritten
    load_pretrained(model, tmp_path)
    save_pretrained(model, tmp_path, max_shard_size="20KB")
    fill_parameters(model)
    assert torch.equal(logits_of(model), logits_of(theirs))


def test_a_full_disk_leaves_the_old_files(checkpoints, tmp_path):
    resource = pytest.importorskip("resource")
    _, theirs = checkpoints("llama")
    save_pretrained(theirs, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(DiskFullError):
            save_pretrained(theirs, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


_MEMORY = """
import sys, torch
from torch import nn
from headwater.core.empty import empty_parameters, initial_values
from headwater.core.lazy import LazyTensor
from headwater.api.pretrained import load_pretrained, save_pretrained

def peak_mib():
    status = open("/proc/self/status").read()
    return int(status.split("VmHWM:")[1].split()[0]) >> 10

class Net(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2048, 2048, bias=False) for _ in range(count))  # 16 MiB each

def make(count, folder, size):
    with empty_parameters():
        model = Net(count)
    shape = (2048, 2048)
    def lazy(i):
        return LazyTensor.whole(lambda: torch.full(shape, float(i)), shape, torch.float32)
    state = {f"layers.{i}.weight": lazy(i) for i in range(count)}
    model.state_dict = lambda: state
    save_pretrained(model, folder, max_shard_size=size)
    with empty_parameters():
        model = Net(count)
    load_pretrained(model, folder)
    for i, read in enumerate(initial_values(model).values()):
        assert read().sum().item() == i * 2048 * 2048
    save_pretrained(model, folder + "/copy", max_shard_size=size)

make(2, sys.argv[1] + "/warm", "1GB")
before = peak_mib()
make(12, sys.argv[1] + "/large", "100MB")
print(peak_mib() - before)
"""


@pytest.mark.real_start
def test_memory_is_that_of_one_tensor(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", _MEMORY, str(tmp_path)],
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"},  # what is freed goes back to the system
        capture_output=True,
        text=True,
        check=True,
    )
    assert sum(path.stat().st_size for path in (tmp_path / "large").glob("*.safetensors")) == pytest.approx(
        12 * 2048 * 2048 * 4, rel=1e-3
    )
    assert int(result.stdout) < 80
