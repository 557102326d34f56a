"""The params files of the public Model Zoo load, their models are built, and each kind of model is traced."""

import pytest
from public_files import FILES, ROOT, different_files, model_section

from headwater.config import load_params
from headwater.plan.trace import trace_step
from headwater.trainer.zoo_job import meta_model, zoo_trainable

DEPTHS = {"num_hidden_layers", "encoder_num_hidden_layers", "decoder_num_hidden_layers"}
LAYERS = 2
"""Further layers are like these; `test_shipped_params` traces a model of each family at its depth."""

pytestmark = pytest.mark.skipif(not FILES, reason="the public params files are not here")


def fewer_layers(section, prefix):
    """Yield the overrides that shorten every stack of layers of a model."""
    for key, value in section.items():
        if isinstance(value, dict):
            yield from fewer_layers(value, f"{prefix}.{key}")
        elif key in DEPTHS and value is not None and value > LAYERS:
            yield f"{prefix}.{key}", LAYERS


@pytest.mark.parametrize("file", FILES)
def test_a_file_loads_and_its_model_is_built(file):
    assert sum(weight.numel() for weight in meta_model(load_params(ROOT / file).init.model).parameters()) > 0


@pytest.mark.parametrize("file", different_files(trainings=False))
def test_every_kind_of_model_is_traced_with_the_sizes_of_a_file(file):
    keys = dict(fewer_layers(model_section(file), "trainer.init.model"))
    config = load_params(ROOT / file, keys)
    trainable = zoo_trainable(config.init, 64 if "nlp" in file else None)
    trace = trace_step(
        trainable.model, trainable.example(1), config.init.precision.precision, loss_function=trainable.loss
    )
    assert len(trace.costs) > 1


def test_all_113_public_params_files_are_present():
    assert len(FILES) == 113
