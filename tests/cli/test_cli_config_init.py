"""`headwater config init`: the files that it writes train."""

import io

import pytest

from headwater.cli.main import main
from headwater.config import load_params
from headwater.config.json_schema import params_schema

ALL = ["--steps", "2", "--batch_size", "4", "--precision", "fp32", "--host_memory", "auto", "--disk", "none"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("family", ["gpt", "llama", "bloom", "falcon", "mixtral"])
def test_a_new_file_trains(family, data, here, headwater):
    code, out, _ = headwater("config", "init", "run.yaml", "--data", data, "--model", family, *ALL)
    assert code == 0
    assert out == "wrote run.yaml; next:\n  headwater plan run.yaml\n  headwater fit run.yaml\n"
    code, out, err = headwater("fit", "run.yaml")
    assert code == 0, err
    assert (here / "runs/run/checkpoint_2").is_dir()
    assert '"loader": 0' in (here / "runs/run/history.jsonl").read_text()  # it was evaluated too


def test_sizes_and_lengths_follow_from_data_and_shipped_file(data, here):
    assert main(["config", "init", "run.yaml", "--data", str(data), "--yes"]) == 0
    run = load_params("run.yaml")
    model = run.init.model
    assert (model.name, model.vocab_size, model.max_position_embeddings) == ("gpt2", 300, 16)
    assert (run.init.loop.max_steps, run.fit.train_dataloader.batch_size) == (600, 16)
    assert run.fit.train_dataloader.data_dir == (data / "train",)
    assert run.fit.val_dataloader[0].data_dir == run.validation.val_dataloader.data_dir == (data / "val",)
    assert run.init.backend == load_params("run.yaml").init.backend.__class__()
    assert run.init.model_dir.as_posix() == "runs/run"


def test_each_flag_has_an_effect(data, here):
    words = [
        "--data",
        data,
        "--model",
        "gpt/tiny",
        "--epochs",
        "3",
        "--batch_size",
        "2",
        "--precision",
        "bf16",
    ]
    words += ["--host_memory", "2GiB", "--disk", "my scratch: 1", "--model_dir", "elsewhere"]
    assert main(["config", "init", "run.yaml", *map(str, words)]) == 0
    init = load_params("run.yaml").init
    assert (init.loop.max_steps, init.loop.num_epochs) == (None, 3)
    assert init.precision.precision.name == "bf16"
    assert (init.backend.host_memory, str(init.backend.disk.path)) == (2 << 30, "my scratch: 1")
    assert str(init.model_dir) == "elsewhere"


def test_data_without_validation_part(data, here):
    assert main(["config", "init", "run.yaml", "--data", str(data / "train"), "--yes"]) == 0
    run = load_params("run.yaml")
    assert run.fit.train_dataloader.data_dir == (data / "train",)
    assert (run.fit.val_dataloader, run.validation) == ((), None)


@pytest.mark.parametrize(
    ("model", "train", "val"),
    [
        ("mnist/fc_mnist", {"data_dir": "my/digits"}, {"data_dir": "my/digits"}),
        ("t5", {"src_data_dir": "my/digits/train", "src_vocab_file": "my/digits/tokenizer.json"}, {}),
        ("bert/tiny_sst2", {"data_dir": "my/digits", "vocab_file": "data/bert/vocab.txt"}, {}),
        ("llava/tiny_coco", {"data_dir": "my/digits/train", "img_data_dir": "my/digits"}, {}),
    ],
)
def test_all_data_paths_are_moved(model, train, val, here, capsys):
    assert main(["config", "init", "run.yaml", "--data", "my/digits", "--model", model, "--yes"]) == 0
    fit = load_params("run.yaml").fit
    for loader, keys in ((fit.train_dataloader, train), (fit.val_dataloader[0], val)):
        for key, value in keys.items():
            found = getattr(loader, key)
            assert str(found[0] if isinstance(found, tuple) else found) == value
    assert "my/digits does not exist yet" in capsys.readouterr().err


def test_questions_are_repeated_until_the_answer_is_valid(data, here, monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    answers = f"{data}\nlama\nllama\n2 epoch\n\nfp31\n\n\n\n"
    monkeypatch.setattr("sys.stdin", Terminal(answers))
    assert main(["config", "init", "run.yaml"]) == 0
    run = load_params("run.yaml")
    assert (run.init.model.name, run.init.loop.num_epochs) == ("llama", 2)
    output = capsys.readouterr()
    assert "Samples per step [16]: " in output.out
    assert "write 'llama'" in output.err and "fp31" in output.err


def test_without_a_terminal_the_missing_flag_is_named(data, here, capsys):
    assert main(["config", "init", "--data", str(data), *ALL]) == 2
    assert "stdin is not a terminal" in (said := capsys.readouterr().err)
    assert "write --model (default: gpt/tiny)" in said
    assert not (here / "params.yaml").exists()


def test_a_file_is_replaced_only_with_force(data, here, capsys):
    (here / "run.yaml").write_text("mine")
    words = ["config", "init", "run.yaml", "--data", str(data), "--yes"]
    assert main(words) == 2
    assert "--force" in capsys.readouterr().err
    assert (here / "run.yaml").read_text() == "mine"
    assert main([*words, "--batch_size", "x", "--force"]) == 2
    assert (here / "run.yaml").read_text() == "mine"
    assert main([*words, "--force"]) == 0
    assert load_params("run.yaml").fit is not None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "gtp"], "write 'gpt'"),
        (["--model", "roberto/base"], "roberta/base"),
        (["--steps", "0"], "an integer > 0"),
        (["--host_memory", "much"], "write for example 8GiB"),
        (["--host_memory", "0"], "expected at least 1 byte, found '0'"),
        (["--model", "hf:nowhere"], "config.json"),
    ],
)
def test_a_wrong_answer(words, said, data, here, capsys):
    assert main(["config", "init", "run.yaml", "--data", str(data), *words, "--yes"]) == 2
    assert said in capsys.readouterr().err
    assert not (here / "run.yaml").exists()


@pytest.mark.parametrize("option", ["--data", "--disk", "--model_dir"])
@pytest.mark.parametrize(
    ("answer", "said"),
    [("", "found an empty name"), ("taken", "found a file: taken"), ("taken/below", "found a file: taken")],
)
def test_an_answer_that_cannot_be_a_folder(option, answer, said, data, here, capsys):
    (here / "taken").write_text("mine")
    words = ["config", "init", "run.yaml", "--data", str(data), option, answer, "--yes"]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert f"expected a folder, {said}\n  where: {option}" in error
    assert not (here / "run.yaml").exists()


def test_an_error_in_the_new_params_names_the_file(data, here, monkeypatch, capsys):
    monkeypatch.setattr("headwater.cli.config_init.start_text", lambda *given: "trainer:\n  innit: {}\n")
    assert main(["config", "init", "run.yaml", "--data", str(data), "--yes"]) == 2
    assert "where: run.yaml, line 2" in capsys.readouterr().err


def test_a_folder_that_does_not_exist_is_refused_before_questions(here, monkeypatch, capsys):
    monkeypatch.setattr("headwater.cli.config_init._ask_all", lambda args: pytest.fail("asked"))
    assert main(["config", "init", "new/run.yaml"]) == 2
    assert "the folder of the file does not exist\n  where: new/run.yaml" in capsys.readouterr().err


def test_a_new_file_names_the_schema_in_its_folder(data, here, capsys):
    words = ["config", "init", "--data", str(data), "--yes"]
    assert main([*words, "one.yaml"]) == 0
    assert main(["config", "schema", "--output", "headwater.schema.json"]) == 0
    assert main([*words, "two.yaml"]) == 0
    line = "# yaml-language-server: $schema=headwater.schema.json\n"
    assert line not in (here / "one.yaml").read_text()
    assert (here / "two.yaml").read_text().startswith(line)


def test_new_files_follow_the_schema(data, here):
    from jsonschema import Draft202012Validator

    from headwater.config.yaml_reader import read_document

    # Unlike `jsonschema.validate`, this does not check the schema itself; `test_json_schema` does.
    validator = Draft202012Validator(params_schema())
    for number, words in enumerate((["--yes"], ["--epochs", "2", "--host_memory", "1GiB", "--yes"])):
        assert main(["config", "init", f"{number}.yaml", "--data", str(data), *words]) == 0
        validator.validate(read_document(here / f"{number}.yaml").tree)


def test_a_model_of_the_transformers_library_trains(data, here, headwater):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=300, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained("my-gpt2")
    words = ["--data", data, "--model", "hf:my-gpt2", *ALL]
    assert headwater("config", "init", "run.yaml", *words)[0] == 0
    code, _, err = headwater("fit", "run.yaml")
    assert code == 0, err
    assert (here / "runs/run/checkpoint_2").is_dir()
