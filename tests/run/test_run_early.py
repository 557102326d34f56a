"""`--validate_only` and `--compile_only`: no weights, no training."""

import pytest
import torch
from own_models import PARAMS, Classifier, get_train_dataloader, write_params

from headwater.run import run

DEVICES = []


class OnMeta(Classifier):
    """A model that records the device on which it is built."""

    def __init__(self, params, device=None):
        super().__init__(params)
        self.loss_fn = torch.nn.CrossEntropyLoss(weight=torch.ones(4))
        self.around = torch.nn.ModuleList([self.model])
        DEVICES.append(next(self.model.parameters()).device.type)


@pytest.mark.parametrize("option", ["--validate_only", "--compile_only"])
def test_compile_only_and_validate_only_do_not_train(tmp_path, capsys, option):
    params = write_params(tmp_path, text=PARAMS)
    DEVICES.clear()
    run(OnMeta, get_train_dataloader, argv=["--params", str(params), "--mode", "train", option])
    out = capsys.readouterr().out
    assert DEVICES == ["meta"]
    assert not list((tmp_path / "run").glob("checkpoint_*"))
    if option == "--validate_only":
        assert out.startswith("valid: ") and "AdamW" in out
        assert not (tmp_path / "run").exists()
    else:
        assert "layers.1" in out
        assert list((tmp_path / "run" / "compile").iterdir())


def test_shapes_that_do_not_fit_together(tmp_path, capsys):
    params = write_params(tmp_path, text=PARAMS.replace("dropout: 0.1", "inputs: 11"))
    with pytest.raises(SystemExit) as error:
        run(
            Classifier,
            get_train_dataloader,
            argv=["--params", str(params), "--mode", "train", "--validate_only"],
        )
    assert error.value.code == 2
    assert "layers.0" in capsys.readouterr().err
