"""Passes of a few tokens: layers whose products the kernel computes, compared with passes by torch."""

import pytest
import torch
from torch import nn

from headwater.core.few_rows import MOST_ROWS, few_row_product_available
from headwater.generation.batcher import Batcher
from headwater.generation.requests import GenerationRequest, Limits
from headwater.generation.sampling import Sampling
from headwater.models import few_rows
from headwater.models.decoder import Decoder
from headwater.models.few_rows import FewRows
from headwater.models.sequences import Piece

CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(not few_row_product_available(), reason="no C compiler")

FAMILIES = {
    "gpt2": {},
    "gated": {"nonlinearity": "swiglu", "position_embedding_type": "rotary", "rotary_dim": 8},
    "softcap": {"final_logit_softcapping": 5.0},
    "experts": {"moe": {"num_experts": 4, "top_k": 2}},
    "adapters": {"lora_params": {"r": 4, "target_modules": ["*"]}},
}


@pytest.fixture
def products(monkeypatch):
    """Count the products that the replaced layers compute."""
    seen, compute = [], few_rows.few_row_linear

    def counted(x, weight, bias=None):
        seen.append(tuple(weight.shape))
        return compute(x, weight, bias)

    monkeypatch.setattr(few_rows, "few_row_linear", counted)
    return seen


@pytest.fixture(params=FAMILIES.values(), ids=FAMILIES)
def model(request, tiny):
    model = Decoder(tiny(**request.param), seed=1).eval()
    torch.manual_seed(1)
    for parameter in model.parameters():  # adapters begin with zeros
        nn.init.normal_(parameter, std=0.2)
    return model


def prompts_of(count):
    generator = torch.Generator().manual_seed(count)
    return [torch.randint(0, 97, (3 + number,), generator=generator) for number in range(count)]


def logits_after(model, prompts, rows):
    """Return the logits of a token after each prompt, read in passes of `rows` sequences."""
    caches = [model.new_cache(20) for _ in prompts]
    layers, found = FewRows(model, CPU), []
    with torch.no_grad():
        for prompt, cache in zip(prompts, caches, strict=True):
            model.next_logits([Piece(prompt, cache)])
        pieces = [Piece(torch.tensor([5 + number]), cache) for number, cache in enumerate(caches)]
        for start in range(0, len(pieces), rows):
            part = pieces[start : start + rows]
            with layers.of(len(part)):
                found.append(model.next_logits(part))
    return torch.cat(found)


def test_the_kernel_computes_all_linear_layers_of_a_pass_of_few_tokens(model, products):
    prompts = prompts_of(MOST_ROWS)
    expected = logits_after(model, prompts, MOST_ROWS)
    assert {tuple(each.shape) for name, each in model.named_parameters() if "head" in name} <= set(products)
    products.clear()
    with torch.no_grad():
        torchs = model.next_logits([Piece(prompts[0], model.new_cache(20))])
    assert not products, "passes without the context are torch's"
    assert torchs.shape == (1, expected.shape[1])


def test_logits_of_a_text_do_not_depend_on_the_other_texts_of_a_pass(model):
    prompts = prompts_of(MOST_ROWS)
    together = logits_after(model, prompts, MOST_ROWS)
    for rows in (1, 3):
        assert torch.equal(logits_after(model, prompts, rows), together)


def test_logits_are_torchs_up_to_rounding(model, monkeypatch):
    prompts = prompts_of(3)
    found = logits_after(model, prompts, 1)
    monkeypatch.setattr(few_rows, "few_row_product_available", lambda: False)
    torch.testing.assert_close(found, logits_after(model, prompts, 1), rtol=1e-4, atol=1e-5)


def test_larger_passes_and_layers_after_a_pass_are_torchs(model, products):
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    layers = FewRows(model, CPU)
    with torch.no_grad(), layers.of(MOST_ROWS + 1):
        model.next_logits([Piece(torch.arange(MOST_ROWS + 1), model.new_cache(20))])
    with pytest.raises(KeyError), layers.of(1):
        raise KeyError
    assert not products
    assert all(vars(module).keys() == before[name].keys() for name, module in model.named_modules())


def test_layers_of_other_libraries_are_replaced(products):
    class Bilinear(nn.Linear):
        def forward(self, input):
            return super().forward(input) * input.sum()

    model = nn.Sequential(nn.Linear(4, 3), Bilinear(3, 2))
    x = torch.randn(1, 4)
    with torch.no_grad():
        expected = model(x)
        with FewRows(model, CPU).of(1):
            found = model(x)
    torch.testing.assert_close(found, expected)
    assert products == [(3, 4)], "a subclass may do more than a linear layer"


def test_requests_that_join_and_leave_get_the_tokens_of_each_prompt_alone(model, products):
    prompts = [tuple(prompt.tolist()) for prompt in prompts_of(5)]

    def texts(together):
        batcher, found = Batcher(model, "cpu", Limits(200, 9, 5)), []
        for prompt in prompts:
            found.append(batcher.add(GenerationRequest(prompt, 8, Sampling(0))))
            if not together:
                batcher.run()
        batcher.run()
        return [each.output for each in found]

    assert texts(together=True) == texts(together=False)
    assert products
