"""Models of the package reach an accuracy on real data that a broken model could not reach.

The default suite trains them for a few seconds; `scripts/real_data` trains them as they ship.
"""

import pytest

from headwater.config import find_params, load_params
from headwater.trainer.session import fit
from shared_data import SHARED

DATA = SHARED / "data"


def trained(params, tmp_path, data, **overrides):
    """Return the accuracy of a run of shipped params on data that are not shipped."""
    if not DATA.is_dir():
        pytest.skip("the data sets are not here")
    keys = {"trainer.init.model_dir": str(tmp_path), **overrides}
    for loader in ("fit.train_dataloader", "fit.val_dataloader", "validate.val_dataloader"):
        keys |= {f"trainer.{loader}.{key}": str(DATA / value) for key, value in data.items()}
    result = fit(load_params(find_params(params), keys))
    (evaluation,) = result.validation
    return evaluation.metrics["accuracy"]


WHOLE = (pytest.mark.slow, pytest.mark.real_data)


def steps(count):
    """Return overrides for a run of `count` steps with an evaluation at its end."""
    return {"trainer.init.loop.max_steps": count, "trainer.init.loop.eval_frequency": count}


@pytest.mark.parametrize(("count", "least"), [(200, 0.9), pytest.param(3000, 0.975, marks=WHOLE)])
def test_a_small_network_learns_handwritten_digits(tmp_path, count, least):
    last = steps(count)
    schedule = [{"ConstantLR": {"learning_rate": 1e-3}}] if count < 3000 else None
    last |= {"trainer.init.schedulers": schedule} if schedule else {}
    assert trained("mnist/fc_mnist", tmp_path, {"data_dir": "mnist"}, **last) >= least


@pytest.mark.slow
@pytest.mark.real_data
def test_a_small_bert_learns_the_sentiment_of_sentences(tmp_path):
    """The larger class is 51 % of the sentences."""
    data = {"data_dir": "sst2", "vocab_file": "vocab/bert/bert-base-uncased-vocab.txt"}
    assert trained("bert/tiny_sst2", tmp_path, data, **steps(300)) >= 0.72
