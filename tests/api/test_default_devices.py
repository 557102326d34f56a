"""Training loops that set a default device, as `torch.set_default_device("cuda")` does."""

from contextlib import nullcontext

import torch
from any_loop import Net, adamw, batches, check, every_plan, loss_of
from torch import nn

import headwater


def default_device(place):
    """Enter `meta` as the default device, whose tensors have no values, but not for plain PyTorch."""
    return torch.device("meta") if place.plan else nullcontext()


@every_plan
def test_tensors_of_the_engine_do_not_go_to_the_default_device(plan, tmp_path):
    data = batches(6)

    def script(place):
        model = Net()
        with default_device(place):
            model = place.compile(model)
            optimizer = adamw(model.parameters())
            found = []
            for tokens, classes in data[:4]:
                loss = loss_of(model(tokens), classes)
                loss.backward()
                found += [loss.item(), nn.utils.clip_grad_norm_(model.parameters(), 0.5)]
                optimizer.step()
                optimizer.zero_grad()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, place.folder / "state.pt")
            state = torch.load(place.folder / "state.pt", map_location="cpu")
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            with torch.no_grad():
                found += [model.eval()(data[4][0]), *(param.square().sum() for param in model.parameters())]
                model.head.weight.mul_(0.5)
            loss_of(model.train()(data[5][0]), data[5][1]).backward()
            found += [param.grad for param in model.parameters()]
            optimizer.step()
            return found, model.state_dict(), optimizer.state_dict()

    check(script, plan, tmp_path)


@every_plan
def test_checkpoints_do_not_go_to_the_default_device(plan, tmp_path):
    data = batches(2)

    def script(place):
        model = Net()
        with default_device(place):
            model = place.compile(model)
            optimizer = adamw(model.parameters())
            for tokens, classes in data:
                loss_of(model(tokens), classes).backward()
                optimizer.step()
                optimizer.zero_grad()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            headwater.save(state, place.folder / "state")
            state = headwater.load(place.folder / "state")
            model.load_state_dict(state["model"])
            return model.state_dict(), state["optimizer"]

    check(script, plan, tmp_path)
