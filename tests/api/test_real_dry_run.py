"""A forward that needs real values in the dry run, and changes its own weights."""

import pytest
import torch
from any_loop import check
from torch import nn


class Net(nn.Module):
    """A model that computes with numpy, which fake tensors cannot, and shrinks a weight in place."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.middle = nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        x = self.first(x) * float(self.first.weight.detach().numpy().mean())
        with torch.no_grad():
            self.middle.weight.mul_(0.9)
        return self.head(torch.tanh(self.middle(x)))


@pytest.mark.parametrize("plan", ["memory", "slabs", "recompute"])
def test_weights_that_a_forward_changes_are_as_in_plain_pytorch(plan, tmp_path):
    def script(place):
        model = place.compile(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(3):
            if step == 1:  # the model is planned again, with weights that are in the store
                model.head = nn.Linear(6, 2)
                optimizer.add_param_group({"params": list(model.head.parameters())})
            loss = model(torch.randn(4, 6)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, model

    check(script, plan, tmp_path)
