"""Checkpoints of a streamed model, in both formats, against transformers and plain PyTorch."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from headwater.api.backend import backend  # noqa: E402
from headwater.api.compile import compile  # noqa: E402
from headwater.api.files import load, save  # noqa: E402
from headwater.api.pretrained import load_pretrained, save_pretrained  # noqa: E402
from headwater.core.empty import empty_parameters  # noqa: E402
from headwater.core.lazy import StoredTensor  # noqa: E402

AUTO = transformers.AutoModelForCausalLM
TOKENS = torch.arange(24).view(2, 12) * 7 % 90 + 3


def make_config():
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    dropout = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    return transformers.GPT2Config(
        n_embd=32, n_layer=3, n_head=4, n_positions=32, vocab_size=96, **special, **dropout
    )


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pretrained")
    torch.manual_seed(0)
    AUTO.from_config(make_config()).save_pretrained(folder, max_shard_size="20KB")
    return folder


def make_plain(folder):
    model = AUTO.from_pretrained(folder)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def make_streamed(folder):
    with empty_parameters():
        model = AUTO.from_config(make_config())
    load_pretrained(model, folder)
    compile(model, backend("CSX", num_slabs=2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def train(model, optimizer, steps):
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_same_weights(model, expected):
    for (name, one), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_a_fine_tuned_model_is_saved_for_transformers(pretrained, tmp_path):
    plain, streamed = make_plain(pretrained), make_streamed(pretrained)
    assert train(*streamed, 3) == train(*plain, 3)
    save_pretrained(streamed[0], tmp_path, max_shard_size="20KB")
    assert_same_weights(AUTO.from_pretrained(tmp_path), plain[0])


def test_state_files(pretrained, tmp_path):
    plain, streamed = make_plain(pretrained), make_streamed(pretrained)
    for who in (plain, streamed):
        train(*who, 2)
    state = {"model": streamed[0].state_dict(), "optimizer": streamed[1].state_dict()}
    assert all(isinstance(value, StoredTensor) for value in state["model"].values())
    save(state, tmp_path / "x.mdl")
    expected = train(*plain, 2)
    for resumed in (make_streamed(pretrained), make_plain(pretrained)):
        train(*resumed, 1)
        found = load(tmp_path / "x.mdl")
        resumed[0].load_state_dict(found["model"])
        resumed[1].load_state_dict(found["optimizer"])
        assert train(*resumed, 2) == expected


def test_a_checkpoint_is_loaded_into_a_streamed_model(pretrained):
    plain, streamed = make_plain(pretrained), make_streamed(pretrained)
    train(*streamed, 1)
    load_pretrained(streamed[0], pretrained)
    assert_same_weights(streamed[0], plain[0])


def test_masters_keep_the_precision_of_the_checkpoint(pretrained, tmp_path):
    model, optimizer = make_streamed(pretrained)
    with torch.autocast("cpu", torch.bfloat16):
        train(model, optimizer, 1)
    load_pretrained(model, pretrained)
    save_pretrained(model, tmp_path)
    assert_same_weights(AUTO.from_pretrained(tmp_path), AUTO.from_pretrained(pretrained))
