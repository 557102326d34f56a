"""The model: components are found by the names of transformers' models."""

import copy
import inspect

import torch
from torch.nn import functional as F


class CPUMasterModel:
    def __init__(self, hf_model, config):
        core, self._config = hf_model.model, config
        assert hf_model.config.hidden_size % hf_model.config.num_attention_heads == 0
        self._parts = [core.embed_tokens, *core.layers, core.norm, hf_model.lm_head]
        accepted = inspect.signature(core.layers[0].forward).parameters
        assert {"position_embeddings", "attention_mask", "use_cache", "output_attentions"} <= set(accepted)
        # The weights on the device are copies.
        self._copies = [copy.deepcopy(part).to("cpu") for part in self._parts]
        self._rotary = copy.deepcopy(core.rotary_emb)

    def get_parameters(self):
        return [param for part in self._parts for param in part.parameters()]

    def forward_and_backward(self, input_ids, attention_mask, labels):
        embed, *layers, norm, head = self._copies
        places = torch.arange(input_ids.shape[1])[None]
        turns = tuple(each.to(self._config.dtype) for each in self._rotary(torch.empty(1), places))
        hidden = embed(input_ids)
        for layer in layers:
            hidden = layer(
                hidden,
                position_embeddings=turns,
                attention_mask=attention_mask,
                use_cache=False,
                output_attentions=False,
            )
        logits = head(norm(hidden)[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten())
        loss.backward()
        for param, copied in zip(self.get_parameters(), self._copied(), strict=True):
            param.grad, copied.grad = copied.grad, None
        return loss.item(), input_ids.numel(), {}

    def _copied(self):
        return [param for part in self._copies for param in part.parameters()]

    def _sync_params_to_gpu(self):
        with torch.no_grad():
            for param, copied in zip(self.get_parameters(), self._copied(), strict=True):
                copied.copy_(param)

    def zero_grad(self):
        for param in self.get_parameters():
            param.grad = None
