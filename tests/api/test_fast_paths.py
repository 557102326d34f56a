"""torch modules with a fast path for evaluation take that path on streamed weights too."""

import pytest
import torch
from any_loop import check, odd_plans, randn, train
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")

PADDED = torch.tensor([[0, 0, 0, 0, 1], [0, 0, 1, 1, 1], [0, 0, 0, 0, 0]]).bool()


def encoder(depth=2):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, depth, norm=nn.LayerNorm(8))


class Classifier(nn.Module):
    """A model with an encoder between other layers."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.encoder = encoder(3)
        self.head = nn.Linear(8, 3)

    def forward(self, x, padded=None):
        return self.head(self.encoder(self.enter(x), src_key_padding_mask=padded))


def evaluated(model, *args, **kwargs):
    model.eval()
    with torch.no_grad():
        output = model(*args, **kwargs)
    model.train()
    return output


@odd_plans
def test_an_encoder_returns_zeros_at_padded_positions(plan, tmp_path):
    def script(place):
        model = place.compile(Classifier())
        x = randn(3, 5, 8, seed=9)
        before = evaluated(model, x, PADDED)
        trained = train(model, lambda number: model(randn(3, 5, 8, seed=number), PADDED).square().mean())
        with torch.inference_mode():
            in_training = model(x, PADDED)
        return before, trained, in_training, evaluated(model, x, PADDED), evaluated(model, x)

    check(script, plan, tmp_path)


@odd_plans
def test_an_encoder_that_is_the_whole_model_takes_the_fast_path(plan, tmp_path):
    def script(place):
        model = place.compile(encoder())
        x = randn(3, 5, 8, seed=9)
        outputs = [evaluated(model, x, src_key_padding_mask=PADDED) for _ in range(2)]
        assert outputs[0][1, 2:].eq(0).all()
        trained = train(model, lambda number: model(x, src_key_padding_mask=PADDED).square().mean())
        return outputs, trained, evaluated(model, x, src_key_padding_mask=PADDED)

    check(script, plan, tmp_path)


@odd_plans
def test_a_frozen_encoder_takes_the_fast_path_while_gradients_are_recorded(plan, tmp_path):
    def script(place):
        model = place.compile(Classifier().requires_grad_(False).eval())
        x = randn(3, 5, 8, seed=9)
        return model(x, PADDED), model(x), model.encoder(x, src_key_padding_mask=PADDED)

    check(script, plan, tmp_path)


@odd_plans
def test_single_layers_and_attention_take_the_fast_path(plan, tmp_path):
    class Attention(nn.MultiheadAttention):
        def forward(self, x):
            return super().forward(x, x, x, need_weights=False)[0]

    def script(place):
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        attention = nn.Sequential(*(Attention(8, 2, batch_first=True) for _ in range(3)))
        models = [place.compile(nn.Sequential(layer, nn.Linear(8, 8))), place.compile(attention)]
        return [evaluated(model, randn(2, 5, 8, seed=1)) for model in models]

    check(script, plan, tmp_path)


@odd_plans
def test_a_user_hook_turns_the_fast_path_off(plan, tmp_path):
    def script(place):
        model = place.compile(Classifier())
        model.encoder.layers[1].linear1.register_forward_hook(lambda module, args, output: output * 2)
        return evaluated(model, randn(3, 5, 8, seed=1)), evaluated(model, randn(3, 5, 8, seed=1))

    check(script, plan, tmp_path)
