"""Every command of the page on data does what the page says, with the record beside it."""

import json
import re
from pathlib import Path

import pytest

from headwater.cli.data import MODE_HELP
from headwater.cli.main import main
from headwater.data.modes import MODES
from headwater.data.reader import open_samples
from headwater.data.statistics import read_statistics

PAGE = (Path(__file__).parents[2] / "docs/data.md").read_text(encoding="utf-8")
SECTION = re.compile(r"### (\w+)\n.*?```json\n(.*?)```\n\n```bash\nheadwater (.*?)\n```", re.DOTALL)
EXAMPLES = {mode: (record, command) for mode, record, command in SECTION.findall(PAGE.split("### masked")[0])}


def test_every_mode_has_its_place():
    assert list(MODE_HELP) == list(MODES)
    assert set(EXAMPLES) | {"masked"} == set(MODES)
    assert all(f"`{mode}`" in PAGE for mode in MODES)


@pytest.mark.parametrize("mode", EXAMPLES)
def test_the_example_of_a_mode_runs(mode, tmp_path, monkeypatch, capsys):
    record, command = EXAMPLES[mode]
    monkeypatch.chdir(tmp_path)
    Path(f"{mode}.jsonl").write_text(json.dumps(json.loads(record)) + "\n", encoding="utf-8")
    Path(f"{mode}.jsonl").write_text(Path(f"{mode}.jsonl").read_text() * 40)
    if image := json.loads(record).get("image"):
        Path("images").mkdir()
        Path("images", image).write_bytes(b"")  # opened in training
    words = command.split()
    assert main([*words, "--processes", "1"]) == 0, capsys.readouterr().err
    out = Path(words[words.index("--out") + 1])
    statistics = read_statistics(out)
    assert statistics.mode == mode and statistics.documents == 40
    assert statistics.train_samples and statistics.val_samples
    assert main(["data", "show", str(out), "--out", "page.html"]) == 0
    assert f"{out.name}: {mode}" in Path("page.html").read_text()


def test_the_example_with_a_data_set_of_the_hugging_face_library_runs(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("It was the best of times.\nIt was the worst of times.\n" * 50)
    words = ["--out", "prepared", "--vocab_size", "300", "--sequence_length", "16", "--processes", "1"]
    assert main(["data", "book.txt", *words]) == 0
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file="prepared/tokenizer.json", eos_token="<|endoftext|>"
    )
    tokenizer.save_pretrained("my_tokenizer")
    (code,) = re.findall(r"## Data sets of other libraries\n\n```python\n(.*?)```", PAGE, re.DOTALL)
    exec(code.replace("2048", "32").replace("num_proc=8", "num_proc=1"), {})
    samples = open_samples([tmp_path / "book_hdf5_dataset"], vocab_size=300, max_position_embeddings=32)
    batch = samples.__getitems__(range(len(samples)))
    assert len(samples) > 10
    assert (batch["labels"][:, :-1] == batch["input_ids"][:, 1:]).all()
