"""Linear layers with low-rank adapters."""

import torch

from headwater.models.layers.lora import LoRALinear, merged


def test_merged_weight_computes_the_same_as_the_layer_with_adapters():
    torch.manual_seed(0)
    rows = [slice(0, 4), slice(8, 11)]
    layer = LoRALinear(6, 12, rank=2, scale=0.5, dropout=0.0, rows=rows, bias=True)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    x = torch.randn(3, 5, 6)
    weight = merged(layer.weight, layer.lora_a, layer.lora_b, rows, 0.5)
    torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, weight, layer.bias))
    assert torch.equal(weight[4:8], layer.weight[4:8]) and torch.equal(weight[11:], layer.weight[11:])


def test_one_adapter_for_all_outputs():
    torch.manual_seed(0)
    layer = LoRALinear(6, 4, rank=2, scale=2.0, dropout=0.0, rows=[slice(0, 4)], bias=False)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    x = torch.randn(5, 6)
    expected = x @ (layer.weight + 2.0 * layer.lora_b @ layer.lora_a).T
    torch.testing.assert_close(layer(x), expected)
