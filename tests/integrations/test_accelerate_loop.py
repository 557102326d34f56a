"""A loop of accelerate with a streamed model saves and loads the files of one with a plain model."""

import pytest
from accelerate import Accelerator, cpu_offload, disk_offload
from accelerate.hooks import remove_hook_from_submodules
from places import assert_same_tensors, backend, every_plan, text_rows
from safetensors import safe_open
from trainers import gpt2

import headwater
from headwater.core.errors import StreamError

ROWS = text_rows(8, 24)


@pytest.fixture
def accelerator():
    return Accelerator(cpu=True)


def called(place):
    """Return a GPT-2, whose head is tied, after one forward; it streams if `place` is a backend."""
    model = gpt2() if place is None else headwater.compile(gpt2(), place)
    model(ROWS)
    return model


def names_in(file):
    with safe_open(file, "pt") as opened:
        return sorted(opened.keys())


@every_plan
def test_a_model_with_tied_weights_loads_the_state_that_the_other_kind_has_saved(plan, accelerator, tmp_path):
    kinds = {"plain": None, "streamed": backend(plan, tmp_path)}
    for name, place in kinds.items():
        saved = accelerator.prepare_model(called(place))
        accelerator.save_state(str(tmp_path / name))
        accelerator.free_memory()
        for other in kinds.values():
            loaded = accelerator.prepare_model(called(other))
            for weight in loaded.parameters():
                weight.data.zero_()
            accelerator.load_state(str(tmp_path / name))
            assert_same_tensors(loaded.state_dict(), saved.state_dict())
            accelerator.free_memory()
    assert names_in(tmp_path / "streamed/model.safetensors") == names_in(tmp_path / "plain/model.safetensors")


def test_save_pretrained_of_a_streamed_model_writes_a_tied_weight_once(tmp_path):
    for name, place in (("plain", None), ("streamed", backend("slabs", tmp_path))):
        called(place).save_pretrained(tmp_path / name)
    assert names_in(tmp_path / "streamed/model.safetensors") == names_in(tmp_path / "plain/model.safetensors")


@pytest.mark.parametrize("offload", [cpu_offload, lambda model: disk_offload(model, "offloaded")])
def test_a_model_whose_weights_accelerate_keeps_elsewhere_is_refused(offload, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = gpt2()
    offload(model)
    with pytest.raises(StreamError, match=r"where: transformer\.wte(.|\n)*remove_hook_from_submodules"):
        headwater.compile(model, backend("slabs", tmp_path))
    remove_hook_from_submodules(model)
    model.lm_head.weight = model.transformer.wte.weight  # accelerate has made two parameters
    model = headwater.compile(model, backend("slabs", tmp_path))
    assert model.eval()(ROWS).logits.equal(gpt2().eval()(ROWS).logits)
