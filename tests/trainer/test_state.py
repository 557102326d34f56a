"""The exchange of a run's state between ranks."""

import torch

from headwater.fabric.codec import decode, encode
from headwater.optim.loss_scale import LossScale
from headwater.trainer.state import RunState


def test_a_state_with_masks_can_be_sent_between_ranks():
    masks = {"blocks.0.ffn.input.weight": torch.tensor([3, 255], dtype=torch.uint8)}
    state = RunState(7, LossScale(), data={"epoch": 1, "sample": 20}, masks=masks)
    received = decode(encode(state, RunState), RunState)
    assert torch.equal(received.masks.pop("blocks.0.ffn.input.weight"), next(iter(masks.values())))
    assert received.to_dict() == {**state.to_dict(), "masks": {}}
