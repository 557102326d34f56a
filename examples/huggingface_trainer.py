"""A transformers Trainer whose model is streamed."""

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import headwater as hw
from headwater.integrations.transformers import StreamedTrainer


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random sequences."""

    def __init__(self, size: int) -> None:
        self.tokens = torch.randint(64, (size, 16), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


torch.manual_seed(0)
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0)
)
args = TrainingArguments(
    output_dir=tempfile.mkdtemp(prefix="headwater-example-"),
    max_steps=4,
    per_device_train_batch_size=4,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
)
trainer = StreamedTrainer(
    model=model, args=args, train_dataset=Tokens(16), backend=hw.backend("CSX", num_slabs=2)
)
trainer.train()
print("losses", [entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
