"""A LightningModule whose weights are streamed. Only the strategy differs from plain Lightning."""

import logging
import tempfile

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headwater.integrations.lightning import StreamedStrategy


class Classifier(pl.LightningModule):
    """A classifier with six equal blocks."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(6))
        self.layers = nn.Sequential(*blocks, nn.Linear(32, 4))
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self(inputs), labels)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
torch.manual_seed(0)
inputs = torch.randn(64, 32)
loader = DataLoader(TensorDataset(inputs, inputs[:, :4].argmax(-1)), batch_size=16)
module = Classifier()
trainer = pl.Trainer(
    strategy=StreamedStrategy(num_slabs=2),
    max_epochs=3,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir=tempfile.mkdtemp(prefix="headwater-example-"),
)
trainer.fit(module, loader)
print("losses", [round(loss, 4) for loss in module.losses])
