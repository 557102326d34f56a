"""Fine-tuning of a checkpoint that is never whole in memory: load, train with weights on disk, save."""

import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import headwater as hw

folder = Path(tempfile.mkdtemp(prefix="headwater-example-"))

# A tiny random checkpoint takes the place of a large one.
config = LlamaConfig(
    vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4
)
AutoModelForCausalLM.from_config(config).save_pretrained(folder / "checkpoint")

# tier and num_slabs are set because this model is small. For a large one write host_memory="8GiB" instead.
backend = hw.backend("CSX", disk=folder / "scratch", tier="disk", num_slabs=2)
with hw.empty_parameters():  # a model without values
    config = AutoConfig.from_pretrained(folder / "checkpoint")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
hw.load_pretrained(model, folder / "checkpoint")  # remembers where the values are
hw.compile(model, backend)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

tokens = torch.randint(128, (4, 16), generator=torch.Generator().manual_seed(0)).to(backend.torch_device)
for step in range(1, 6):
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())

hw.save_pretrained(model, folder / "tuned")
print("saved", sorted(path.name for path in (folder / "tuned").iterdir()))
print("loads:", type(AutoModelForCausalLM.from_pretrained(folder / "tuned")).__name__)
