"""`StreamedTrainer` before a trainer of TRL equals that trainer, and streams all its models."""

import re

import pytest
from datasets import Dataset
from places import assert_same_tensors, backend
from tokenizers import Tokenizer, decoders, models
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

from headwater.api.compile import is_compiled
from headwater.integrations.transformers import StreamedTrainer

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")

NUMBERS = range(24)
TEXTS = Dataset.from_dict({"text": [f"after {number} comes {number + 1}" for number in NUMBERS]})
PROMPTS = Dataset.from_dict({"prompt": [f"say {number}: " for number in NUMBERS]})
PAIRS = PROMPTS.add_column("chosen", [f"{number} yes" for number in NUMBERS]).add_column(
    "rejected", [f"no {number + 1}" for number in NUMBERS]
)
LABELLED = PROMPTS.add_column("completion", [f"{number} yes" for number in NUMBERS]).add_column(
    "label", [number % 2 == 0 for number in NUMBERS]
)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Return the folders of a language model and of a reward model, which read and write single letters."""
    folder = tmp_path_factory.mktemp("models")
    tokens = ["<pad>", "<eos>", "<unk>", *(chr(code) for code in range(32, 127))]
    letters = Tokenizer(
        models.BPE({token: place for place, token in enumerate(tokens)}, [], unk_token="<unk>")
    )
    letters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=letters, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        num_labels=1,
    )
    for kind in (LlamaForCausalLM, LlamaForSequenceClassification):
        kind(config).save_pretrained(folder / kind.__name__)
        tokenizer.save_pretrained(folder / kind.__name__)
    return {kind: folder / kind.__name__ for kind in (LlamaForCausalLM, LlamaForSequenceClassification)}


def trainer_of(kind, config, checkpoints, folder, place=None, *, model=LlamaForCausalLM, data, **options):
    """Return a trainer of TRL; it streams if `place` is a backend."""
    rewards = options.pop("rewards", None)
    args = config(
        output_dir=str(folder),
        max_steps=3,
        per_device_train_batch_size=4,
        logging_steps=1,
        learning_rate=1e-3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **{"bf16": False, "save_strategy": "no"} | options,
    )
    given = {"args": args, "train_dataset": data}
    given |= {"model": model.from_pretrained(checkpoints[model])}
    given |= {"processing_class": PreTrainedTokenizerFast.from_pretrained(checkpoints[model])}
    if rewards is not None:
        given["reward_funcs"] = rewards(checkpoints)
    if place is None:
        return kind(**given)
    return type(f"Streamed{kind.__name__}", (StreamedTrainer, kind), {})(backend=place, **given)


def history(trainer):
    """Return the logs, without times and the number of tokens, which a checkpoint of TRL does not have."""
    return [
        {key: value for key, value in entry.items() if not re.search("time|second|num_tokens", key)}
        for entry in trainer.state.log_history
    ]


def digits(completions, **_):
    return [float(sum(letter.isdigit() for letter in text)) for text in completions]


def reward_model(checkpoints):
    return LlamaForSequenceClassification.from_pretrained(checkpoints[LlamaForSequenceClassification])


def rewards(checkpoints):
    return [reward_model(checkpoints), digits]


GENERATING = {
    "data": PROMPTS,
    "rewards": rewards,
    "beta": 0.1,
    "num_generations": 4,
    "max_completion_length": 8,
}
CASES = {
    "sft": (SFTTrainer, SFTConfig, {"data": TEXTS, "gradient_accumulation_steps": 2}),
    "sft in bf16": (SFTTrainer, SFTConfig, {"data": TEXTS, "bf16": True}),
    "dpo with a reference that follows": (
        DPOTrainer,
        DPOConfig,
        {"data": PAIRS, "sync_ref_model": True, "ref_model_sync_steps": 1},
    ),
    "kto": (KTOTrainer, KTOConfig, {"data": LABELLED}),
    "reward": (
        RewardTrainer,
        RewardConfig,
        {"data": PAIRS.remove_columns("prompt"), "model": LlamaForSequenceClassification},
    ),
    "grpo": (GRPOTrainer, GRPOConfig, GENERATING | {"num_iterations": 2}),
    "grpo with accumulation": (GRPOTrainer, GRPOConfig, GENERATING | {"gradient_accumulation_steps": 2}),
}


@pytest.mark.parametrize(("kind", "config", "options"), CASES.values(), ids=CASES)
def test_a_run_equals_that_of_the_plain_trainer(kind, config, options, checkpoints, tmp_path):
    plain = trainer_of(kind, config, checkpoints, tmp_path / "plain", **options)
    plain.train()
    ours = trainer_of(kind, config, checkpoints, tmp_path / "ours", backend("disk", tmp_path), **options)
    ours.train()
    assert history(ours) == history(plain)
    assert_same_tensors(ours.model.state_dict(), plain.model.state_dict())


def test_reference_and_reward_models_are_streamed(checkpoints, tmp_path):
    place = backend("disk", tmp_path)
    trainer = trainer_of(GRPOTrainer, GRPOConfig, checkpoints, tmp_path / "run", place, **GENERATING)
    assert is_compiled(trainer.model)
    assert is_compiled(trainer.ref_model)
    assert is_compiled(trainer.reward_funcs[0])
    plain = trainer_of(GRPOTrainer, GRPOConfig, checkpoints, tmp_path / "run", "CPU", **GENERATING)
    assert not is_compiled(plain.ref_model)


def test_a_run_continues_from_a_checkpoint_of_the_plain_trainer(checkpoints, tmp_path):
    options = {"data": PAIRS, "save_strategy": "steps", "save_steps": 1}
    plain = trainer_of(DPOTrainer, DPOConfig, checkpoints, tmp_path / "plain", **options)
    plain.train()
    ours = trainer_of(
        DPOTrainer, DPOConfig, checkpoints, tmp_path / "ours", backend("disk", tmp_path), **options
    )
    ours.train(resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-2"))
    assert history(ours)[:-1] == history(plain)[:-1]
    assert_same_tensors(ours.model.state_dict(), plain.model.state_dict())
