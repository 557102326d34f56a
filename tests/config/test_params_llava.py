"""Params of LLaVA that come with the package against the public ones."""

import pytest

from headwater.config import find_params, load_params
from headwater.convert.formats import LLAVA
from shared_data import SHARED

FOLDER = SHARED / "public_params" / "multimodal" / "llava" / "configs"


@pytest.mark.parametrize("phase", [1, 2])
@pytest.mark.parametrize("size", ["7b", "13b"])
def test_shipped_llava_models_equal_the_public_ones(size, phase):
    if not FOLDER.is_dir():
        pytest.skip("the public params files are not here")
    public = load_params(FOLDER / f"params_llava_v1p5_pretrain_{size}_phase{phase}_MSL2K.yaml")
    ours = load_params(find_params(f"llava/llava_1p5_{size}_phase{phase}"))
    assert LLAVA.meaning(ours.init.model) == LLAVA.meaning(public.init.model)
    for key in ("freeze", "image_start_idx", "num_features"):
        assert getattr(ours.init.model, key) == getattr(public.init.model, key)
    assert ours.init.optimizer == public.init.optimizer
    assert ours.init.loop.max_steps == public.init.loop.max_steps
    sides = (ours.fit.train_dataloader, public.fit.train_dataloader)
    shown = [[step for step in side.transforms if step.name != "center_crop"] for side in sides]
    assert shown[0] == shown[1]  # nothing is left to crop of a square of that size
