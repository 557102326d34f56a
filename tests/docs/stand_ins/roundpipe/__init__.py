"""A stand-in for RoundPipe: the same calls, on the CPU, without overlap."""

import dataclasses

import torch

from . import optim

__all__ = ["RoundPipe", "RoundPipeRunConfig", "optim"]


@dataclasses.dataclass
class RoundPipeRunConfig:
    num_microbatch: int


class RoundPipe:
    def __init__(self, model, *, optim_dtype, name, model_run_config, pin_model):
        assert pin_model in ("alloc", "register", "off")
        self._model, self._count, self._name = model, model_run_config.num_microbatch, name
        self._masters = [param.detach().to(optim_dtype, copy=True) for param in model.parameters()]

    def optim_parameters(self):
        yield from self._masters

    def forward_backward(self, input_args, loss_fn):
        total = torch.zeros(())
        for args in zip(*(each.chunk(self._count) for each in input_args), strict=True):
            first, *others = self._model
            state = first(*args)
            for layer in others:
                state = layer(state)
            loss = loss_fn(state, None)
            loss.backward()
            total += loss.detach()
        return total

    def step(self, step_fn):
        params = list(self._model.parameters())
        for master, param in zip(self._masters, params, strict=True):
            master.grad, param.grad = param.grad.to(master.dtype), None
        step_fn()
        with torch.no_grad():
            for master, param in zip(self._masters, params, strict=True):
                param.copy_(master)
