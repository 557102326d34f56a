"""Fine-tuning by params: adapters and preferences begin with the weights of an earlier run."""

import h5py
import numpy as np
import pytest
import torch
import yaml
from run_samples import assert_same_checkpoint, write_params
from safetensors.torch import load_file
from tokenizers import Tokenizer

from headwater.trainer.pretrained import checkpoint_weights

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def base(tmp_path_factory, data):
    """The model_dir of a pre-trained model, and its weights."""
    from headwater.cli.main import main

    folder = tmp_path_factory.mktemp("base")
    assert main(["fit", str(write_params(folder, data))]) == 0
    return folder / "run", dict(checkpoint_weights(folder / "run/checkpoint_6"))


def fine_tuning(params, base, model, data=None):
    """The params with another model section, and a start from the weights of `base`."""
    tree = yaml.safe_load(params.read_text())
    trainer = tree["trainer"]
    trainer["init"]["model"] = model(trainer["init"]["model"])
    trainer["init"]["callbacks"] = [{"LoadCheckpointStates": {"load_checkpoint_states": "model"}}]
    trainer["fit"]["ckpt_path"] = str(base / "checkpoint_6")
    if data is not None:
        trainer["fit"]["train_dataloader"] = data
        del trainer["fit"]["val_dataloader"], trainer["validate"]
    params.write_text(yaml.safe_dump(tree))
    return params


def test_adapters_are_trained_on_top_of_an_earlier_run(headwater, params, base, tmp_path):
    def with_adapters(model):
        return model | {"lora_params": {"r": 2, "alpha": 8.0}}

    model_dir, before = base
    path = fine_tuning(params, model_dir, with_adapters)
    code, _, error = headwater("fit", path)
    assert code == 0, error
    after = dict(checkpoint_weights(tmp_path / "run/checkpoint_6"))
    assert all(torch.equal(after[name], value) for name, value in before.items())
    adapters = {name: value for name, value in after.items() if name not in before}
    assert len(adapters) == 2 * 2 * 2
    assert all(value.any() for value in adapters.values())

    # Check that an interrupted run resumes bit-identically.
    other = f"--trainer.init.model_dir={tmp_path / 'other'}"
    assert headwater("fit", path, other, "--trainer.init.loop.max_steps=3")[0] == 0
    assert headwater("fit", path, other, "--trainer.fit.ckpt_path=null")[0] == 0
    assert_same_checkpoint(tmp_path / "run/checkpoint_6", tmp_path / "other/checkpoint_6")

    code, _, error = headwater(
        "checkpoint", "export", "--model_dir", tmp_path / "run", "--out", tmp_path / "hf"
    )
    assert code == 0, error
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    assert torch.equal(exported["transformer.h.0.mlp.c_fc.weight"].T, before["blocks.0.ffn.input.weight"])
    layer = "blocks.0.attention.output"
    update = 4 * after[f"{layer}.lora_b"] @ after[f"{layer}.lora_a"]
    expected = before[f"{layer}.weight"] + update
    torch.testing.assert_close(exported["transformer.h.0.attn.c_proj.weight"].T, expected)

    code, _, error = headwater(
        "checkpoint", "export", "--model_dir", tmp_path / "run", "--out", tmp_path / "peft", "--adapters"
    )
    assert code == 0, error
    [file] = (tmp_path / "peft").glob("*.safetensors")
    name = "base_model.model.transformer.h.0.attn.c_proj.lora_B.weight"
    assert torch.equal(load_file(file)[name], after[f"{layer}.lora_b"])
    code, _, error = headwater(
        "checkpoint", "export", "--model_dir", model_dir, "--out", tmp_path / "none", "--adapters"
    )
    assert code == 2 and "the model has no adapters" in error


@pytest.fixture
def preferences(tmp_path):
    """Write pairs of answers; the preferred answer repeats one token."""
    folder = tmp_path / "preferences"
    folder.mkdir()
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, 300, (2, 32, 16), dtype=np.int32)
    tokens[0, :, 8:14] = 7
    labels = tokens.copy()
    labels[:, :, :8] = labels[:, :, 14:] = -100
    with h5py.File(folder / "data-0.h5", "w") as file:
        for side, index in (("chosen", 0), ("rejected", 1)):
            file[f"{side}_input_ids"], file[f"{side}_labels"] = tokens[index], labels[index]
    return {
        "data_processor": "DpoHDF5DataProcessor",
        "data_dir": str(folder),
        "batch_size": 8,
        "shuffle": True,
    }


def test_preferences_are_learnt_beside_a_frozen_reference(headwater, params, base, preferences, tmp_path):
    def preferring(model):
        return {"name": "dpo", "policy_model": model, "dpo": {"beta": 0.1}}

    model_dir, before = base
    path = fine_tuning(params, model_dir, preferring, preferences)
    code, output, error = headwater("fit", path, "--trainer.init.loop={max_steps: 12}")
    assert code == 0, output + error
    after = dict(checkpoint_weights(tmp_path / "run/checkpoint_12"))
    assert after.keys() == {f"{role}.{name}" for role in ("policy", "reference") for name in before}
    for name, value in before.items():
        assert torch.equal(after[f"reference.{name}"], value)
        assert not torch.equal(after[f"policy.{name}"], value)
    lines = (tmp_path / "run/history.jsonl").read_text().splitlines()
    losses = [yaml.safe_load(line)["loss"] for line in lines]
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)
    assert losses[-1] < 0.4
    code, _, error = headwater(
        "checkpoint", "export", "--model_dir", tmp_path / "run", "--out", tmp_path / "hf"
    )
    assert code == 0, error
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    assert torch.equal(exported["transformer.wte.weight"], after["policy.embedding.weight"])

    (tmp_path / "run/tokenizer.json").write_bytes((model_dir / "tokenizer.json").read_bytes())
    words = ("--model_dir", tmp_path / "run", "--prompt", "The", "--max_new_tokens", 6, "--temperature", 0)
    code, output, error = headwater("generate", *words)
    assert code == 0, error
    tokenizer = Tokenizer.from_file(str(tmp_path / "run/tokenizer.json"))
    prompt = torch.tensor([tokenizer.encode("The").ids])
    policy = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    written = policy.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=0, pad_token_id=0)
    assert output.removesuffix("\n") == tokenizer.decode(written[0].tolist())
