"""Any model of the transformers library, trained from a folder with its config.json."""

import json
import shutil

import pytest
import torch
import yaml
from run_samples import assert_same_checkpoint, losses
from tokenizers import Tokenizer

from headwater.config import load_params
from headwater.config.models.huggingface import HuggingFaceConfig
from headwater.core.batches import IGNORED
from headwater.core.stage import ParamSpec
from headwater.models.huggingface import HuggingFaceModel, library_arguments
from headwater.models.registry import FAMILIES, build_model, meta_batch
from headwater.trainer.datasets import open_data
from headwater.trainer.huggingface import LibraryValues
from headwater.trainer.pretrained import checkpoint_weights

transformers = pytest.importorskip("transformers")

VOCABULARY = 300
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 16,
}


def llama(**more):
    return transformers.Qwen2Config(num_key_value_heads=2, **SIZES, **more)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory, data):
    """A folder with a model that no converter knows, its tokenizer and what belongs to that."""
    folder = tmp_path_factory.mktemp("pretrained") / "qwen2"
    torch.manual_seed(0)
    transformers.Qwen2ForCausalLM(llama(eos_token_id=5)).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes((data / "tokenizer.json").read_bytes())
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    return folder


@pytest.fixture
def library_params(params, pretrained):
    """The params of a run of that model."""
    tree = yaml.safe_load(params.read_text())
    tree["trainer"]["init"]["model"] = {"hf": str(pretrained)}
    params.write_text(yaml.safe_dump(tree))
    return params


def changed(params, **model):
    """The params with other keys in the model's section."""
    tree = yaml.safe_load(params.read_text())
    tree["trainer"]["init"]["model"] |= model
    params.write_text(yaml.safe_dump(tree))
    return params


def batch_of(model, task, generator):
    """A batch as the data pipelines make it, and the library's arguments for the same one."""
    tokens = torch.randint(3, VOCABULARY, (3, 16), generator=generator)
    ones = torch.ones_like(tokens)
    if task == "causal_lm":
        mask = ones.clone()
        mask[0, 10:] = 0
        counted = tokens.masked_fill(torch.cat([ones[:, :1], mask[:, :-1]], 1) == 0, IGNORED)
        labels = torch.cat([tokens[:, 1:], tokens[:, :1]], 1)
        return {"input_ids": tokens, "labels": labels, "attention_mask": mask}, {
            "input_ids": tokens,
            "labels": counted,
        }
    if task == "masked_lm":
        places = torch.tensor([[1, 5, 0], [2, 3, 4], [7, 0, 0]])
        weights = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0]])
        ids = torch.randint(3, VOCABULARY, (3, 3), generator=generator)
        labels = torch.full_like(tokens, IGNORED)
        for row, column in weights.nonzero().tolist():
            labels[row, places[row, column]] = ids[row, column]
        ours = {"masked_lm_positions": places, "masked_lm_ids": ids, "masked_lm_weights": weights}
        return {"input_ids": tokens, "attention_mask": ones, **ours}, {
            "input_ids": tokens,
            "attention_mask": ones,
            "labels": labels,
        }
    if task == "seq2seq":
        mask = ones.clone()
        mask[1, 8:] = 0
        ours = {
            "input_ids": tokens,
            "attention_mask": ones,
            "decoder_input_ids": tokens.flip(1),
            "decoder_attention_mask": mask,
        }
        return ours | {"labels": tokens}, ours | {"labels": tokens.masked_fill(mask == 0, IGNORED)}
    classes = torch.tensor([0, 2, 1])
    if task == "sequence_classification":
        both = {"input_ids": tokens, "attention_mask": ones, "labels": classes}
        return both | {"token_type_ids": torch.zeros_like(tokens)}, both
    images = torch.randn(3, 3, 16, 16, generator=generator)
    return {"inputs": images, "labels": classes}, {"pixel_values": images, "labels": classes}


MODELS = {
    "causal_lm": lambda: transformers.Qwen2ForCausalLM(llama()),
    "masked_lm": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)),
    "seq2seq": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    ),
    "sequence_classification": lambda: transformers.DistilBertForSequenceClassification(
        transformers.DistilBertConfig(
            vocab_size=VOCABULARY, dim=32, n_layers=2, n_heads=4, hidden_dim=64, num_labels=3
        )
    ),
    "image_classification": lambda: transformers.ResNetForImageClassification(
        transformers.ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3
        )
    ),
}


@pytest.mark.parametrize("task", MODELS)
def test_loss_of_a_transformers_model_equals_the_librarys(task, tmp_path):
    torch.manual_seed(1)
    theirs = MODELS[task]()
    theirs.save_pretrained(tmp_path)
    config = HuggingFaceConfig.model_validate({"name": "hf", "hf": str(tmp_path)})
    assert config.kind == task
    model = build_model(config, device="meta")
    assert isinstance(model, HuggingFaceModel)
    initial = LibraryValues(model, 0)
    values = {
        name: initial(ParamSpec(name, tuple(p.shape), torch.float32, torch.float32))
        for name, p in model.named_parameters()
    }
    buffers = dict(model.named_buffers())
    ours, given = batch_of(model, task, torch.Generator().manual_seed(2))
    expected = meta_batch(config, 3, 16)
    assert expected.keys() == ours.keys()
    for mode in (True, False):
        theirs.train(mode)
        model.train(mode)
        torch.manual_seed(7)
        reference = theirs(**given).loss
        torch.manual_seed(7)
        found = torch.func.functional_call(model, {**values, **buffers}, (ours,))
        assert torch.equal(found, reference)


def test_loss_weights_are_the_numbers_of_labels(pretrained):
    config = HuggingFaceConfig.model_validate({"name": "hf", "hf": str(pretrained)})
    ours, given = batch_of(None, "causal_lm", torch.Generator().manual_seed(2))
    labels = FAMILIES["hf"].labels(config, ours)
    assert int(labels) == int((given["labels"][:, 1:] != IGNORED).sum())


def test_run_from_pretrained_weights_continues_without_their_folder(
    headwater, library_params, pretrained, tmp_path
):
    folder = tmp_path / "model"
    shutil.copytree(pretrained, folder)
    changed(library_params, hf=str(folder))
    code, _, error = headwater("fit", library_params, "--trainer.init.loop.max_steps=4")
    assert code == 0, error
    run = tmp_path / "run"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    config = load_params(library_params)
    first = next(
        iter(
            open_data(config.fit.train_dataloader, config.init.model, seed=3, repeat=True).create_dataloader()
        )
    )
    arguments = library_arguments("causal_lm", first)
    assert losses(run)[0] == theirs(**arguments).loss.item()

    # Nothing of the run needs the folder, and the run may be moved.
    shutil.rmtree(folder)
    moved = tmp_path / "moved"
    run.rename(moved)
    assert headwater("fit", moved, "--trainer.init.loop.max_steps=6")[0] == 0
    assert len(losses(moved)) == 6
    code, output, error = headwater("validate", moved)
    assert code == 0, error
    assert "validation loss" in output

    code, _, error = headwater("checkpoint", "export", "--model_dir", moved, "--out", tmp_path / "out")
    assert code == 0, error
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(exported) is type(theirs)
    state = exported.state_dict()
    trained = dict(checkpoint_weights(moved / "checkpoint_6"))
    assert all(torch.equal(state[name.removeprefix("hf.")], value) for name, value in trained.items())
    for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json", "tokenizer.json"):
        assert (tmp_path / "out" / name).is_file()
    assert exported.generation_config.eos_token_id == 5

    words = ("--prompt", "The rain", "--max_new_tokens", 5, "--temperature", 0)
    code, output, error = headwater("generate", "--model_dir", moved, *words)
    assert code == 0, error
    tokenizer = Tokenizer.from_file(str(moved / "tokenizer.json"))
    prompt = torch.tensor([tokenizer.encode("The rain").ids])
    written = exported.generate(prompt, max_new_tokens=5, do_sample=False, eos_token_id=[5, 0])
    assert output.strip("\n") == tokenizer.decode(written[0].tolist())


def test_random_weights_of_a_folder_with_only_a_config_are_the_same_in_every_tier(
    headwater, library_params, pretrained, tmp_path
):
    folder = tmp_path / "config"
    folder.mkdir()
    shutil.copy(pretrained / "config.json", folder)
    changed(library_params, hf=str(folder))
    short = "--trainer.init.loop.max_steps=2"
    code, _, error = headwater("fit", library_params, short)
    assert code == 0, error
    other = f"--trainer.init.model_dir={tmp_path / 'other'}"
    disk = f"--trainer.init.backend.disk={{path: {tmp_path / 'scratch'}}}"
    code, _, error = headwater("fit", library_params, short, other, disk)
    assert code == 0, error
    assert_same_checkpoint(tmp_path / "run/checkpoint_2", tmp_path / "other/checkpoint_2")
    config = load_params(library_params).init.model
    assert isinstance(config, HuggingFaceConfig)
    drawn = build_model(config, seed=3).hf.state_dict()
    assert drawn["model.layers.0.mlp.up_proj.weight"].std() == pytest.approx(0.02, rel=0.1)
    assert (drawn["model.norm.weight"] == 1).all()
    assert (drawn["model.layers.1.self_attn.q_proj.bias"] == 0).all()


def test_plan_of_a_library_model_reads_no_weights(headwater, library_params, pretrained, tmp_path):
    shutil.copytree(pretrained, tmp_path / "config")
    (tmp_path / "config/model.safetensors").write_bytes(b"not weights")
    changed(library_params, hf=str(tmp_path / "config"))
    code, output, error = headwater("plan", library_params)
    assert code == 0, error
    assert "37.9 k" in output


def bad_folder(kind, pretrained, folder):
    shutil.copytree(pretrained, folder)
    config = json.loads((folder / "config.json").read_text())
    if kind == "no folder":
        shutil.rmtree(folder)
    elif kind == "no config":
        (folder / "config.json").unlink()
    elif kind == "unknown architecture":
        (folder / "config.json").write_text(json.dumps({"model_type": "qwen99"}))
    elif kind == "code of its own":
        own = {"auto_map": {"AutoConfig": "own.Own"}, "model_type": "own"}
        (folder / "config.json").write_text(json.dumps(own))
        (folder / "own.py").write_text("raise SystemExit('this code must not run')")
    elif kind == "config is a number":
        (folder / "config.json").write_text("3")
    elif kind == "no task":
        (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen2Model"]}))
    elif kind == "pickled weights":
        (folder / "model.safetensors").rename(folder / "consolidated.00.pth")
    elif kind == "other sizes":
        (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    elif kind == "another model":
        (folder / "model.safetensors").unlink()
        transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=300, n_embd=32, n_layer=1, n_head=2)
        ).save_pretrained(folder / "other")
        (folder / "other/model.safetensors").rename(folder / "model.safetensors")
    elif kind == "fewer tokens than the tokenizer":
        (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 200}))
        (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("kind", "said"),
    {
        "no folder": "does not exist",
        "no config": "has no config.json",
        "unknown architecture": "qwen99",
        "code of its own": "code in the folder is not run",
        "config is a number": "cannot use this config.json",
        "no task": "write one of causal_lm",
        "pickled weights": "expected model.safetensors or pytorch_model.bin, found consolidated.00.pth",
        "other sizes": "another architecture",
        "another model": "tensors of the model are missing",
        "fewer tokens than the tokenizer": "vocab_size",
    }.items(),
)
def test_folder_that_cannot_be_used_is_refused(headwater, library_params, pretrained, tmp_path, kind, said):
    bad_folder(kind, pretrained, tmp_path / "bad")
    changed(library_params, hf=str(tmp_path / "bad"))
    code, _, error = headwater("fit", library_params)
    assert code == 2
    assert said in error, error
    assert "Traceback" not in error
    assert not list(tmp_path.glob("run/checkpoint_*"))


def test_weights_of_another_model_are_refused_before_the_plan(
    headwater, library_params, pretrained, tmp_path
):
    bad_folder("another model", pretrained, tmp_path / "bad")
    changed(library_params, hf=str(tmp_path / "bad"))
    code, output, error = headwater("fit", library_params, "--host_memory=1MiB")
    assert code == 2
    assert "tensors of the model are missing" in error, output + error


def test_data_of_another_task_are_refused(headwater, library_params):
    changed(library_params, task="masked_lm")
    code, _, error = headwater("fit", library_params)
    assert code == 2
    assert "expected data for the task masked_lm, found GptHDF5DataProcessor" in error
    assert "BertHDF5DataProcessor" in error


def test_an_unknown_model_error_suggests_the_hf_section(headwater, library_params):
    changed(library_params, name="qwen2")
    _, _, error = headwater("fit", library_params)
    assert "unknown model 'qwen2'" in error
    assert "model: {hf: FOLDER}" in error


def test_a_missing_head_is_initialised_and_named(pretrained, caplog):
    section = {"name": "hf", "hf": str(pretrained), "task": "sequence_classification"}
    model = build_model(HuggingFaceConfig.model_validate(section), device="meta")
    initial = LibraryValues(model, 1)
    shape = tuple(model.hf.score.weight.shape)
    drawn = initial(ParamSpec("hf.score.weight", shape, torch.float32, torch.float32))
    assert drawn.std() > 0
    assert torch.equal(
        drawn, LibraryValues(model, 1)(ParamSpec("hf.score.weight", shape, *[torch.float32] * 2))
    )
    assert "initialized randomly: score.weight" in caplog.text
    assert "lm_head.weight" in caplog.text
