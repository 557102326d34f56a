"""A run divides blocks that do not fit; it equals and resumes a run with enough memory."""

import pytest
from own_models import Classifier, assert_equal_checkpoints, get_train_dataloader, history, write_params
from tests.large_blocks import Blocks, known_base  # noqa: F401

from headwater.run import run

pytestmark = pytest.mark.usefixtures("known_base")


class LargeBlocks(Classifier):
    def __init__(self, params, device=None):
        super().__init__(params, device)
        self.model = Blocks()


def train(folder, steps, *options):
    words = ["--params", str(write_params(folder.parent, folder.name)), "--mode", "train"]
    words += ["--max_steps", str(steps), "--trainer.init.backend.disk.path", str(folder.parent / "tier")]
    run(LargeBlocks, get_train_dataloader, argv=[*words, *options])


SMALL = ("--trainer.init.backend.host_memory", "120MiB")


def test_a_run_with_divided_blocks_resumes_a_run_with_whole_blocks(tmp_path, monkeypatch, capsys):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    train(whole, 6)
    train(resumed, 3)
    train(resumed, 6, *SMALL)
    assert history(resumed) == history(whole)
    assert_equal_checkpoints(resumed / "checkpoint_6", whole / "checkpoint_6")

    monkeypatch.setattr("headwater.trainer.planning.divisions", lambda model, partition: iter(()))
    with pytest.raises(SystemExit):
        train(tmp_path / "refused", 3, *SMALL)
    assert "the model does not fit" in capsys.readouterr().err


def test_a_run_with_whole_blocks_resumes_a_run_with_divided_blocks(tmp_path):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    train(whole, 6)
    train(resumed, 3, *SMALL)
    train(resumed, 6)
    assert history(resumed) == history(whole)
    assert_equal_checkpoints(resumed / "checkpoint_6", whole / "checkpoint_6")
