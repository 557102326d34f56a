"""Generation: greedy decoding compared with transformers, with and without cache, and sampling."""

import pytest
import torch

from headwater.core.errors import ConfigError, DataError
from headwater.generation.batcher import Batcher
from headwater.generation.generate import generate
from headwater.generation.requests import GenerationRequest, Limits
from headwater.generation.sampling import Sampling
from headwater.models.decoder import Decoder
from headwater.models.sequences import Piece


@pytest.fixture
def model(tiny):
    return Decoder(tiny()).eval()


@pytest.fixture
def prompt(batch):
    return batch["input_ids"][:, :6].long()


def without_cache(model, tokens, count):
    with torch.no_grad():
        for _ in range(count):
            tokens = torch.cat([tokens, model.logits(tokens)[:, -1:].argmax(-1)], dim=1)
    return tokens


def test_greedy_equals_a_loop_without_cache(model, prompt):
    assert torch.equal(generate(model, prompt, 15, temperature=0), without_cache(model, prompt, 15))


def test_no_new_tokens_return_the_prompt(model, prompt):
    assert torch.equal(generate(model, prompt, 0), prompt)
    assert generate(model, prompt[:0], 3).shape == (0, 6)


def test_greedy_equals_transformers(tmp_path, model, prompt):
    transformers = pytest.importorskip("transformers")
    from headwater.convert.checkpoint import export_hf

    export_hf(model.state_dict(), model.config, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    expected = theirs.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False, pad_token_id=0
    )
    assert torch.equal(generate(model, prompt, 12, temperature=0), expected)


def test_cached_logits_equal_those_of_the_whole_sequence(model, batch):
    tokens = batch["input_ids"].long()
    caches = [model.new_cache(20) for _ in tokens]
    with torch.no_grad():
        expected = model.logits(tokens)
        for part in tokens.split([7, 1, 5, 7], dim=1):
            last = model.next_logits(list(map(Piece, part, caches)))
            torch.testing.assert_close(last, expected[:, caches[0].length - 1], rtol=1e-5, atol=1e-6)
    assert caches[0].length == 20


def test_same_seed_same_tokens(model, prompt):
    first = generate(model, prompt, 10, seed=1)
    torch.manual_seed(99)
    assert torch.equal(first, generate(model, prompt, 10, seed=1))
    assert not torch.equal(first, generate(model, prompt, 10, seed=2))
    assert torch.equal(first[:, :6], prompt)


FAMILIES = {
    "learned": {},
    "rotary": {"position_embedding_type": "rotary", "rotary_dim": 8},
    "alibi": {"position_embedding_type": "alibi"},
    "fixed": {"position_embedding_type": "fixed"},
    "window": {"attention_sliding_window_length": 4, "attention_sink_tokens": 1},
}


@pytest.mark.parametrize("changes", FAMILIES.values(), ids=FAMILIES)
def test_prompts_of_other_lengths_generate_the_tokens_of_each_prompt_alone(tiny, prompt, changes):
    model = Decoder(tiny(**changes)).eval()
    prompts = [row[start:] for row, start in zip(prompt, [0, 2, 5, 3], strict=True)]
    alone = [generate(model, row[None], 10, temperature=0)[0, -10:].tolist() for row in prompts]
    batcher = Batcher(model, "cpu", Limits(100, 7, 4))  # prompts are read in parts, beside generated tokens
    found = [batcher.add(GenerationRequest(tuple(row.tolist()), 10, Sampling(0))) for row in prompts]
    batcher.run()
    assert [each.output for each in found] == alone


@pytest.mark.parametrize("changes", [{}, {"final_logit_softcapping": 5.0}], ids=["plain", "softcap"])
def test_token_scores_equal_those_of_all_logits(tiny, batch, changes):
    model = Decoder(tiny(**changes)).eval()
    tokens, positions = batch["input_ids"].long(), torch.tensor([3, 8, 9])
    rows, columns = torch.tensor([0, 0, 1, 3]), torch.tensor([0, 2, 1, 2])
    targets = torch.tensor([5, 0, 7, 2])
    with torch.no_grad():
        expected = model.logits(tokens)[rows, positions[columns]].log_softmax(-1)
        targets[1] = expected[1].argmax()
        found = model.token_scores(tokens, positions, rows, columns, targets)
    torch.testing.assert_close(found[0], expected.gather(1, targets[:, None])[:, 0])
    assert found[1].tolist() == (expected.argmax(1) == targets).tolist()


class FixedModel:
    """A model that always predicts the same distribution."""

    max_length = 10_000

    def __init__(self, probabilities):
        self.log_probabilities = torch.tensor(probabilities).log()

    def new_cache(self, max_length):
        return None

    def next_logits(self, pieces):
        return self.log_probabilities.expand(len(pieces), -1)


def sampled(rows=2000, **arguments):
    model = FixedModel([0.5, 0.3, 0.15, 0.05])
    tokens = generate(model, torch.zeros(rows, 1, dtype=torch.int64), 4, **arguments)[:, 1:]
    return (tokens.flatten().bincount(minlength=4) / tokens.numel()).tolist()


def test_sampling_follows_the_distribution():
    assert sampled() == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.02)
    assert sampled(top_k=2) == pytest.approx([0.625, 0.375, 0, 0], abs=0.02)
    assert sampled(top_p=0.9) == pytest.approx([0.526, 0.316, 0.158, 0], abs=0.02)
    # Half of the tokens would be others if these two had no effect, so few rows are enough.
    assert sampled(rows=50, top_p=0.4) == [1, 0, 0, 0]
    assert sampled(rows=50, top_k=1) == [1, 0, 0, 0]
    squares = torch.tensor([0.5, 0.3, 0.15, 0.05]) ** 2
    assert sampled(temperature=0.5) == pytest.approx((squares / squares.sum()).tolist(), abs=0.02)


def test_ended_sequences_are_padded_and_stop_early():
    model = FixedModel([0.5, 0.5])
    tokens = generate(model, torch.zeros(50, 1, dtype=torch.int64), 100, eos=1)[:, 1:]
    assert 1 < tokens.shape[1] < 100
    assert torch.equal(tokens.cummax(1).values, tokens)
    assert tokens[:, -1].eq(1).all()


@pytest.mark.parametrize("bad", [{"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_sampling_arguments_out_of_range(model, prompt, bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        generate(model, prompt, 1, **bad)


def test_length_is_checked_before_anything_is_computed(model, prompt):
    assert generate(model, prompt, 19).shape == (4, 25)
    with pytest.raises(DataError, match="at most 19 new tokens"):
        generate(model, prompt, 20)
    with pytest.raises(DataError, match="empty"):
        generate(model, prompt[:, :0], 1)
