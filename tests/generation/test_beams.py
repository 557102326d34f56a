"""Beam search, compared with `generate` of the transformers library token for token."""

import pytest
import torch
import transformers

from headwater.config.models.decoder import DecoderConfig
from headwater.config.models.huggingface import HuggingFaceConfig
from headwater.convert.checkpoint import export_hf
from headwater.core.errors import ConfigError, DataError
from headwater.generation.batcher import Batcher
from headwater.generation.beams import BeamSearch
from headwater.generation.generate import generate
from headwater.generation.requests import GenerationRequest, Limits
from headwater.generation.sampling import Sampling
from headwater.models.decoder import Decoder
from headwater.models.huggingface import HuggingFaceModel

GPT = {
    "name": "gpt2",
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "max_position_embeddings": 64,
    "dropout_rate": 0.0,
    "initializer": {"name": "normal", "std": 0.3},
}
PROMPTS = torch.tensor([[5, 17, 3, 44], [9, 21, 8, 2], [13, 13, 13, 1]])


@pytest.fixture(scope="module", params=[1, 2, 3])
def pair(request, tmp_path_factory):
    """A random GPT, and the library's model of its export."""
    config = DecoderConfig.model_validate(GPT)
    model = Decoder(config, seed=request.param).eval()
    folder = tmp_path_factory.mktemp("exported")
    export_hf(model.state_dict(), config, folder)
    return model, transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def expected(theirs, prompts, ends, **settings):
    settings = {"eos_token_id": ends, "pad_token_id": ends[0] if ends else 0, "do_sample": False, **settings}
    return theirs.generate(prompts, attention_mask=torch.ones_like(prompts), **settings)


@pytest.mark.parametrize("ends", [None, [7], [7, 12, 30, 31, 32, 33]], ids=["no end", "one end", "many ends"])
@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 2},
        {"num_beams": 4},
        {"num_beams": 4, "early_stopping": True},
        {"num_beams": 3, "early_stopping": "never", "length_penalty": 2.0},
        {"num_beams": 3, "length_penalty": -1.0},
        {"num_beams": 5, "no_repeat_ngram_size": 2, "early_stopping": True},
        {"num_beams": 3, "no_repeat_ngram_size": 1},
    ],
    ids=str,
)
def test_tokens_equal_those_of_transformers(pair, ends, settings):
    model, theirs = pair
    found = generate(model, PROMPTS, 20, eos=ends, **settings)
    assert torch.equal(found, expected(theirs, PROMPTS, ends, max_new_tokens=20, **settings))


@pytest.mark.parametrize("family", ["llama", "mamba"])
def test_beams_of_library_models_equal_those_of_the_library(family, tmp_path):
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2}
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    more = {"llama": {"num_attention_heads": 4, "intermediate_size": 40}, "mamba": {"state_size": 4}}[family]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **sizes, **more, **special)
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    theirs.save_pretrained(tmp_path)
    ours = HuggingFaceModel(HuggingFaceConfig.model_validate({"name": "hf", "hf": tmp_path}))
    ours.hf.load_state_dict(theirs.state_dict())
    found = generate(ours.eval(), PROMPTS, 10, num_beams=3)
    assert torch.equal(found, expected(theirs, PROMPTS, None, max_new_tokens=10, num_beams=3))


def test_a_pass_serves_all_beams_and_the_texts_beside_them(pair):
    model, _ = pair
    prompts = [tuple(row) for row in PROMPTS.tolist()]
    passes = []

    class Counting:
        max_length = 64
        new_cache = model.new_cache

        def next_logits(self, pieces):
            passes.append([len(piece.tokens) for piece in pieces])
            return model.next_logits(pieces)

    def requests():
        yield GenerationRequest(prompts[0], 8, beams=BeamSearch(3))
        yield GenerationRequest(prompts[1], 6, Sampling(0))
        yield GenerationRequest(prompts[2], 7, beams=BeamSearch(2))

    batcher = Batcher(Counting(), "cpu", Limits(100, 6, 6))
    together = [batcher.add(request) for request in requests()]
    batcher.run()
    assert passes[0] == [4, 2] and passes[1] == [1, 1, 1, 2, 1]
    alone = []
    for request in requests():
        batcher = Batcher(model, "cpu", Limits(100, 100, 6))
        alone.append(batcher.add(request))
        batcher.run()
    assert [each.output for each in together] == [each.output for each in alone]
    assert [each.reason for each in together] == ["length"] * 3


def test_memory_counts_every_beam():
    model = Decoder(DecoderConfig.model_validate(GPT)).eval()
    batcher = Batcher(model, "cpu", Limits(50, 20, 4))
    request = GenerationRequest((1, 2, 3), 8, beams=BeamSearch(4))
    first, second = batcher.add(request), batcher.add(GenerationRequest((1, 2, 3), 8))
    batcher.step()
    assert (batcher.active, batcher.waiting, batcher.used_cache_tokens) == (4, 1, 40)
    batcher.run()
    assert first.reason == second.reason == "length"
    with pytest.raises(DataError, match="use at most 4 beams"):
        batcher.add(GenerationRequest((1, 2, 3), 8, beams=BeamSearch(5)))
    with pytest.raises(DataError, match="use at most 2 beams"):
        batcher.add(GenerationRequest((1, 2, 3), 20, beams=BeamSearch(4)))


@pytest.mark.parametrize(
    "bad",
    [
        {"num_beams": 0},
        {"num_beams": 257},
        {"num_beams": 2, "no_repeat_ngram_size": -1},
        {"num_beams": 2, "length_penalty": 1000.0},
        {"num_beams": 2, "length_penalty": float("nan")},
    ],
)
def test_settings_out_of_range(bad):
    model = Decoder(DecoderConfig.model_validate(GPT)).eval()
    with pytest.raises(ConfigError, match=list(bad)[-1]):
        generate(model, PROMPTS, 2, **bad)
