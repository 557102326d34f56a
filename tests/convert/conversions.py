"""Helpers for the tests of conversions."""

import torch
from safetensors.torch import load_file


def stored(folder):
    """Return all tensors of a checkpoint, in one file or several."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def losses_of_a_step(module, loss, learning_rate=1e-3):
    """Return the loss before and after one step of AdamW."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=learning_rate, foreach=False)
    before = loss()
    before.backward()
    optimizer.step()
    return torch.stack([before.detach(), loss().detach()])


def assert_chooses(model, batch, written, end):
    """Assert that a sequence-to-sequence model chooses each token of texts that another model has written.

    Args:
        model: the model.
        batch: the sources.
        written: token ids [batch, length]: a start token, then the largest logit's token each time.
        end: id of the end token. Tokens after it are padding.
    """
    with torch.no_grad():
        likeliest = model.logits({**batch, "decoder_input_ids": written[:, :-1]}).argmax(-1)
    expected = written[:, 1:]
    ended = (expected == end).cumsum(1) - (expected == end).long() > 0
    assert torch.equal(likeliest[~ended], expected[~ended])
