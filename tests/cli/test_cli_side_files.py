"""Files beside the weights: kept from import and data preparation, used by generate, written by export."""

import json

import pytest
import torch
import yaml
from tokenizers import Tokenizer

transformers = pytest.importorskip("transformers")

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
FILES = {
    "chat_template.jinja": TEMPLATE,
    "tokenizer_config.json": json.dumps({"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}),
    "special_tokens_map.json": json.dumps({"eos_token": "<|endoftext|>"}),
    "generation_config.json": json.dumps({"eos_token_id": [7, 9], "temperature": 0.6, "do_sample": True}),
}


@pytest.fixture(scope="module")
def published(tmp_path_factory, data):
    """A folder of a chat model, with all that belongs to it."""
    folder = tmp_path_factory.mktemp("published") / "chat"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.5,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes((data / "tokenizer.json").read_bytes())
    for name, content in FILES.items():
        (folder / name).write_text(content)
    return folder


def answer(folder, text, ends):
    """The new text and tokens that transformers writes after `text`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    written = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False, eos_token_id=ends)
    return tokenizer.decode(written[0, len(ids) :].tolist())


def test_chat_run_from_import_to_export(headwater, published, tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    assert headwater("checkpoint", "import", published, "--model_dir", run)[0] == 0
    assert sorted(path.name for path in run.iterdir() if path.name in FILES) == sorted(FILES)
    words = ("--model_dir", run, "--prompt", "Hello", "--max_new_tokens", 8, "--temperature", 0)
    code, output, error = headwater("generate", *words, "--chat", "--system", "Short.")
    assert code == 0, error
    prompt = "<|endoftext|>[system] Short.[user] Hello[assistant] "
    assert output.removesuffix("\n") == answer(published, prompt, [7, 9, 0])
    # Without a word on conversations the prompt is the beginning of a text.
    assert headwater("generate", *words)[1].startswith("Hello")

    records = [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": f"Yes {n}"}]}
        for n in range(12)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    code, _, error = headwater(
        *("data", tmp_path / "chats.jsonl", "--mode", "chat", "--tokenizer", published, "--out"),
        *(tmp_path / "chats", "--sequence_length", 32, "--val_fraction", 0.2, "--processes", 0),
    )
    assert code == 0, error
    assert (tmp_path / "chats/chat_template.jinja").read_text() == TEMPLATE
    tree = yaml.safe_load((run / "params.yaml").read_text())
    loader = {"data_processor": "GptHDF5DataProcessor", "batch_size": 2, "drop_last": False}
    tree["trainer"]["fit"] = {
        "train_dataloader": loader | {"data_dir": str(tmp_path / "chats/train")},
        "val_dataloader": loader | {"data_dir": str(tmp_path / "chats/val")},
    }
    tree["trainer"]["init"]["loop"] = {"max_steps": 2}
    tree["trainer"]["init"]["checkpoint"] = {"steps": 2}
    (run / "params.yaml").write_text(yaml.safe_dump(tree))
    code, _, error = headwater("fit", run)
    assert code == 0, error
    code, output, error = headwater("validate", run)
    assert code == 0, error
    assert "validation loss" in output

    code, _, error = headwater("checkpoint", "export", "--model_dir", run, "--out", out)
    assert code == 0, error
    for name, content in FILES.items():
        assert (out / name).read_text() == content
    code, output, error = headwater("generate", *words)
    assert code == 0, error
    expected = answer(out, "<|endoftext|>[user] Hello[assistant] ", [7, 9, 0])
    assert output.removesuffix("\n") == expected
    assert transformers.AutoTokenizer.from_pretrained(out).chat_template == TEMPLATE


def test_import_keeps_the_end_of_text_of_a_folder_without_generation_config(headwater, published, tmp_path):
    folder = tmp_path / "older"
    folder.mkdir()
    for path in published.iterdir():
        if path.name != "generation_config.json":
            (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 11, "bos_token_id": 1}))
    assert headwater("checkpoint", "import", folder, "--model_dir", tmp_path / "run")[0] == 0
    kept = json.loads((tmp_path / "run/generation_config.json").read_text())
    assert kept["eos_token_id"] == 11
    assert kept["bos_token_id"] == 1


def test_system_message_without_a_conversation_is_refused(headwater, published, tmp_path):
    assert headwater("checkpoint", "import", published, "--model_dir", tmp_path / "run")[0] == 0
    words = ("--model_dir", tmp_path / "run", "--prompt", "Hello", "--no-chat", "--system", "Short.")
    code, _, error = headwater("generate", *words)
    assert code == 2
    assert "--system cannot be used with --no-chat" in error
