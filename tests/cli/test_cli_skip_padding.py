"""Runs that do not compute padding: the same losses up to rounding, and fewer products."""

import pytest
from run_samples import history

from headwater.config import load_params

WORDS = ["good", "bad", "fine", "poor", "film", "plot", "cast", "score", "scene", "ending"]
LINFORMER = "attention_module: linformer\n      extra_attention_params: {projected_length: 8}\n      "
PARAMS = """\
trainer:
  init:
    backend: {{backend_type: CPU, num_slabs: 2, micro_batch_size: 4, skip_padding: {skips}}}
    model_dir: {run}
    model:
      name: bert/classifier
      vocab_size: 16
      hidden_size: 16
      num_hidden_layers: 2
      num_heads: 2
      filter_size: 32
      max_position_embeddings: 64
      dropout_rate: 0.0
      task_dropout: 0.0
      num_labels: 2
    optimizer: {{AdamW: {{learning_rate: 1e-3}}}}
    loop: {{max_steps: 4, eval_frequency: 2}}
    callbacks: [FlopUtilization: {{}}]
  fit:
    train_dataloader: &train
      data_processor: SST2DataProcessor
      data_dir: {folder}
      vocab_file: {folder}/vocab.txt
      max_sequence_length: 64
      batch_size: 8
      shuffle: true
    val_dataloader: {{<<: *train, shuffle: false, is_training: false, drop_last: false}}
"""


@pytest.fixture
def texts(tmp_path):
    """A folder with short texts of two classes, and a vocabulary."""
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]))
    lines = [f"{' '.join(WORDS[n % 7 : n % 7 + n % 3 + 1])}\t{n % 2}" for n in range(32)]
    lines[5] = f"{' '.join(WORDS * 3)}\t1"
    for part in ("train", "dev"):
        (tmp_path / f"{part}.tsv").write_text("sentence\tlabel\n" + "\n".join(lines) + "\n")
    return tmp_path


def _run(headwater, folder, *, skips):
    file, run = folder / f"{skips}.yaml", folder / f"run_{skips}"
    file.write_text(PARAMS.format(folder=folder, run=run, skips=str(skips).lower()))
    code, _, err = headwater("fit", file)
    assert code == 0, err
    return history(run)


def test_a_run_without_padding_has_the_same_losses(headwater, texts, monkeypatch):
    from headwater.models.encoder import Encoder

    lengths, forward = [], Encoder.forward

    def recorded(self, input_ids, *more, **keys):
        if input_ids.device.type == "cpu":
            lengths.append(input_ids.shape[1])
        return forward(self, input_ids, *more, **keys)

    monkeypatch.setattr(Encoder, "forward", recorded)
    whole = _run(headwater, texts, skips=False)
    assert set(lengths) == {64}
    lengths.clear()
    short = _run(headwater, texts, skips=True)
    assert set(lengths) == {8, 32} and lengths.count(8) > lengths.count(32)
    assert len(whole) == len(short) == 6
    for ours, theirs in zip(short, whole, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert (ours["step"], ours["tokens"]) == (theirs["step"], theirs["tokens"])


def test_refusals(headwater, texts):
    file = texts / "run.yaml"
    text = PARAMS.format(folder=texts, run=texts / "run", skips="true")
    file.write_text(text.replace("{backend_type", "{compile: true, backend_type"))
    code, _, err = headwater("config", "validate", file)
    assert code == 2 and "skip_padding changes the shapes of batches" in err
    file.write_text(text.replace("max_position", LINFORMER + "max_position"))
    code, _, err = headwater("plan", file)
    assert code == 2 and "where: trainer.init.backend.skip_padding" in err


def test_the_older_form(tmp_path):
    file = tmp_path / "bert.yaml"
    file.write_text("""\
train_input: {data_processor: SST2DataProcessor, data_dir: data, vocab_file: vocab.txt, batch_size: 8}
model: {name: bert/classifier, num_labels: 2, enable_vts: true}
optimizer: {optimizer_type: AdamW, learning_rate: 0.001}
runconfig: {max_steps: 10}
""")
    assert load_params(file).init.backend.skip_padding
    assert not load_params(file, {"trainer.init.backend.skip_padding": False}).init.backend.skip_padding
