"""Sums and rows over the whole batch when each rank computes a part of it, and their gradients."""

import threading
from contextlib import nullcontext

import torch
from torch.testing import assert_close

from headwater.config.models.encoder import DPRConfig
from headwater.core.whole_batch import part_of_batch, rows, total
from headwater.models.bert import DPR
from headwater.stream.recompute import RecomputedForwards

BATCH = torch.arange(24.0).view(6, 4).sin()


def spread(x):
    """Return a loss that is not a mean over samples."""
    return torch.pdist(x).log().mean() + x.std(0).square().sum()


def test_gradients_averaged_over_ranks_are_those_of_the_whole_batch():
    whole = BATCH.clone().requires_grad_()
    expected = spread(whole)
    expected.backward()
    parts = [part.clone().requires_grad_() for part in BATCH.chunk(3)]
    for rank, part in enumerate(parts):
        with part_of_batch(lambda own: [each.detach() for each in parts], rank):
            loss = spread(rows(part))
        assert_close(loss, expected)
        (loss / len(parts)).backward()
    assert_close(torch.cat([part.grad for part in parts]), whole.grad)


def test_all_ranks_get_bit_identical_rows():
    parts = BATCH.bfloat16().chunk(3)
    for rank, part in enumerate(parts):
        with part_of_batch(lambda own: list(parts), rank):
            assert torch.equal(rows(part.clone().requires_grad_()), BATCH.bfloat16())


def test_totals_have_no_gradient_and_one_rank_has_the_whole_batch():
    own = BATCH.clone().requires_grad_()
    with part_of_batch(lambda own: [own, 2 * own], 0):
        assert_close(total(own), 3 * BATCH)
        assert not total(own).requires_grad
    assert_close(total(own), BATCH)
    assert rows(own) is own


def test_questions_of_every_rank_choose_from_the_passages_of_all():
    tower = {"hidden_size": 8, "num_hidden_layers": 1, "num_heads": 2, "filter_size": 8, "vocab_size": 20}
    tower |= {"max_position_embeddings": 6, "dropout_rate": 0.0}
    model = DPR(DPRConfig(name="dpr", q_encoder=tower, ctx_encoder=tower))
    generator = torch.Generator().manual_seed(0)
    batch = {
        "questions_input_ids": torch.randint(20, (6, 6), generator=generator),
        "ctx_input_ids": torch.randint(20, (6, 2, 6), generator=generator),
    }
    batch |= {
        name.replace("input_ids", "attention_mask"): torch.ones_like(ids) for name, ids in batch.items()
    }
    parts = [{name: value.chunk(3)[rank] for name, value in batch.items()} for rank in range(3)]
    given = [[] for _ in parts]
    for part, own in zip(parts, given, strict=True):
        with part_of_batch(lambda value, own=own: own.append(value) or [value] * 3, 0):
            model(part)
    expected = model(batch)
    expected.backward()
    gradients = {name: param.grad for name, param in model.named_parameters()}
    model.zero_grad()
    for rank, part in enumerate(parts):
        asked = iter(list(zip(*given, strict=True)))
        with part_of_batch(lambda value, asked=asked: list(next(asked)), rank):
            loss = model(part)
        assert_close(loss, expected)
        (loss / 3).backward()
    assert_close({name: param.grad for name, param in model.named_parameters()}, gradients)


def test_a_forward_that_runs_again_on_another_thread_uses_the_whole_batch():
    """On a GPU, autograd runs a backward on its own thread, whose context variables have their defaults."""

    class Block(torch.nn.Module):
        def forward(self, x):
            return torch.sin(total(torch.ones(())) * x)

    block, x = Block(), torch.ones(1, 2, requires_grad=True)
    forwards = RecomputedForwards([(block, (0,))], lambda _: nullcontext(), lambda _: [])
    with part_of_batch(lambda own: [own, own, own], 0):
        backward = threading.Thread(target=block(x).sum().backward)
        backward.start()
        backward.join()
    forwards.unhook()
    assert_close(x.grad, 3 * torch.cos(3 * torch.ones(1, 2)))
