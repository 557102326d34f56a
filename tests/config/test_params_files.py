"""Files that extend others, and those that ship."""

import pytest
import torch
from params_samples import NEWER, public_params, write

from headwater.config import DecoderConfig, find_params, load_params, shipped_params
from headwater.core.errors import ConfigError
from headwater.models.decoder_parameters import initializers

SIZES = ("111m", "256m", "590m", "1p3b", "2p7b", "6p7b", "13b")


def test_a_file_extends_another_key_by_key(tmp_path):
    write(tmp_path, NEWER, "base.yaml")
    path = write(
        tmp_path,
        "extends: base.yaml\ntrainer: {init: {seed: 1, model: {hidden_size: 64}, callbacks: []}}\n",
    )
    run, base = load_params(path), load_params(tmp_path / "base.yaml")
    assert (run.init.seed, run.init.model.hidden_size, run.init.callbacks) == (1, 64, ())
    assert run.init.model.vocab_size == base.init.model.vocab_size
    assert run.fit == base.fit


def test_the_two_forms_may_extend_each_other(tmp_path):
    write(tmp_path, NEWER, "base.yaml")
    path = write(tmp_path, "extends: base.yaml\nmodel: {hidden_size: 64}\nrunconfig: {seed: 1}\n")
    run = load_params(path, ["--runconfig.max_steps=9"])
    assert (run.init.seed, run.init.model.hidden_size, run.init.loop.max_steps) == (1, 64, 9)


def test_another_optimizer_replaces_the_extended_one_by_null(tmp_path):
    write(tmp_path, NEWER, "base.yaml")
    text = "extends: base.yaml\ntrainer: {init: {optimizer: {AdamW: null, SGD: {momentum: 0.9}}}}\n"
    spec = load_params(write(tmp_path, text)).init.optimizer_spec
    assert (spec.name, spec.kwargs["momentum"]) == ("SGD", 0.9)


def test_an_error_names_the_file_of_the_key(tmp_path):
    base = write(tmp_path, NEWER.replace("seed: 7", "sed: 7"), "base.yaml")
    with pytest.raises(ConfigError) as caught:
        load_params(write(tmp_path, "extends: base.yaml\n"))
    assert (caught.value.where or "").startswith(f"{base}, line 8: trainer.init.sed")


def test_files_that_extend_each_other_are_refused(tmp_path):
    write(tmp_path, "extends: b.yaml\n", "a.yaml")
    write(tmp_path, "extends: a.yaml\n", "b.yaml")
    with pytest.raises(ConfigError, match=r"circular extends: .*a\.yaml → .*b\.yaml → .*a\.yaml"):
        load_params(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("base", "what"),
    [
        ("none.yaml", "there is no params file 'none.yaml'"),
        ("[a.yaml]", "expected extends to be the name of one file"),
    ],
)
def test_a_base_that_is_not_there(tmp_path, base, what):
    path = write(tmp_path, f"trainer: {{}}\nextends: {base}\n")
    with pytest.raises(ConfigError) as caught:
        load_params(path)
    assert what in caught.value.what
    assert caught.value.where == f"{path}, line 2: extends"


def test_params_are_found_by_name_and_by_path(tmp_path):
    path = write(tmp_path, NEWER)
    assert find_params(path) == path
    assert find_params("gpt/tiny") == find_params("gpt/tiny.yaml") == shipped_params()["gpt/tiny"]
    with pytest.raises(ConfigError) as caught:
        find_params("gpt/tinny")
    assert "write 'gpt/tiny'" in (caught.value.remedy or "")
    with pytest.raises(ConfigError, match="no params file 'nothing'"):
        find_params("nothing")


def test_base_files_are_not_listed_as_runs():
    base = shipped_params()["gpt/tiny"].parents[1] / "_decoder.yaml"
    assert "extends: ../_decoder.yaml" in shipped_params()["llama/llama1_7b"].read_text()
    assert base.is_file()
    assert not any(name.split("/")[-1].startswith("_") for name in shipped_params())
    with pytest.raises(ConfigError, match="no params file '_decoder'"):
        find_params("_decoder")


def test_a_shipped_file_is_extended_by_name(tmp_path):
    path = write(tmp_path, "extends: gpt/tiny\ntrainer: {init: {seed: 5}}\n")
    assert load_params(path).init.model == load_params(find_params("gpt/tiny")).init.model


@pytest.mark.parametrize("name", sorted(shipped_params()))
def test_shipped_files_load_without_notice(name):
    run = load_params(find_params(name))
    assert run.notices == ()
    assert run.fit is not None
    assert run.fit.train_dataloader.shuffle
    assert run.fit.val_dataloader or run.init.model.name == "dino", "views of images have nothing to guess"
    assert not any(loader.shuffle for loader in run.fit.val_dataloader)


MUP = tuple(f"{size}_mup" for size in ("111m", "256m", "590m", "1p3b", "2p7b"))


@pytest.mark.parametrize("size", (*SIZES, *MUP, "13b_bs1080"))
def test_shipped_sizes_equal_the_public_ones(size):
    folder = public_params("nlp", "gpt3", "configs", "Cerebras_GPT")
    public = load_params(folder / ("13b_bs720.yaml" if size == "13b" else f"{size}.yaml"))
    ours = load_params(find_params(f"gpt/cerebras_gpt_{size}"))
    for key in ("optimizer", "schedulers", "callbacks"):
        assert getattr(ours.init, key) == getattr(public.init, key)
    assert ours.init.precision.precision == public.init.precision.precision
    assert ours.init.precision.max_gradient_norm == public.init.precision.max_gradient_norm
    assert ours.init.loop.max_steps == (174335 if size == "13b" else public.init.loop.max_steps)
    assert ours.fit is not None
    assert public.fit is not None
    assert ours.fit.train_dataloader.batch_size == public.fit.train_dataloader.batch_size
    assert_same_model(ours.init.model, public.init.model)


@pytest.mark.parametrize("size", ["111m", "256m", "590m", "6p7b"])
def test_cosine_of_the_model_card_replaces_a_straight_line_from_and_to_the_same_rates(size):
    line, cosine = (
        load_params(find_params(f"gpt/cerebras_gpt_{size}{kind}")).init for kind in ("", "_cosine")
    )
    assert line.model == cosine.model and line.loop == cosine.loop and line.optimizer == cosine.optimizer
    (before,), (after,) = (
        (each.model_dump(exclude_none=True) for each in line.schedulers),
        (each.model_dump(exclude_none=True) for each in cosine.schedulers),
    )
    *warm_up, decay = before["SequentialLR"]["schedulers"]
    assert after["SequentialLR"]["schedulers"] == (*warm_up, {"CosineDecayLR": decay["LinearLR"]})


def assert_same_model(ours: DecoderConfig, public: DecoderConfig):
    derived = {"attention_dropout_rate", "filter_size", "initializer", "embedding_initializer"}
    for key in set(DecoderConfig.model_fields) - derived - {"output_layer_initializer"}:
        assert getattr(ours, key) == getattr(public, key), key
    assert (ours.ffn_size, ours.attention_dropout) == (public.ffn_size, public.attention_dropout)
    pairs = zip(vars(initializers(ours)).values(), vars(initializers(public)).values(), strict=True)
    for mine, theirs in pairs:
        assert mine.std == pytest.approx(theirs.std)
        assert mine.bounds == pytest.approx(theirs.bounds)


PARAMETERS = {
    "111m": 111e6,
    "256m": 256e6,
    "590m": 590e6,
    "1p3b": 1.3e9,
    "2p7b": 2.7e9,
    "6p7b": 6.7e9,
    "13b": 13e9,
}


@pytest.mark.parametrize("size", SIZES)
def test_sizes_have_the_parameters_of_their_names(size):
    assert num_parameters(load_params(find_params(f"gpt/cerebras_gpt_{size}")).init.model) == pytest.approx(
        PARAMETERS[size], rel=0.05
    )


def test_175b_and_tiny_have_the_parameters_of_their_names():
    assert num_parameters(load_params(find_params("gpt/175b")).init.model) == pytest.approx(175e9, rel=0.01)
    assert num_parameters(load_params(find_params("gpt/tiny")).init.model) == pytest.approx(2.2e6, rel=0.05)


def num_parameters(model: DecoderConfig) -> int:
    """Parameters of transformers' GPT-2 of this shape, made without memory."""
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        gpt2 = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=model.vocab_size,
                n_positions=model.max_position_embeddings,
                n_embd=model.hidden_size,
                n_layer=model.num_hidden_layers,
                n_head=model.num_heads,
                n_inner=model.ffn_size,
                bos_token_id=None,
                eos_token_id=None,
            )
        )
    return sum(param.numel() for param in gpt2.parameters())


def test_the_tiny_run_reaches_its_last_rate_at_its_last_step():
    init = load_params(find_params("gpt/tiny")).init
    rates = [init.schedule.value(step) for step in range(init.loop.end_step(0) + 1)]
    assert max(rates) == rates[50] == 3e-3
    assert rates[-1] == pytest.approx(3e-4)
