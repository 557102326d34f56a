"""A script that trains with trainers of libraries on two ranks: trainer_ranks_script.py KIND FOLDER.

KIND is plain, resident, disk or none. The script trains, evaluates, saves, and resumes from the checkpoint of
a plain run, with transformers' Trainer, and trains with accelerate and with Lightning. Rank 0 writes what it
has seen to FOLDER/seen.json. `none` passes a backend with one rank, which is an error.
"""

import json
import sys
from pathlib import Path

import headwater as hw

kind, folder = sys.argv[1], Path(sys.argv[2])
DISK = {"tier": "disk", "disk": folder / "store", "num_slabs": 3, "activations": "recompute"}
PLANS = {"plain": None, "none": {}, "resident": {"num_csx": 2}, "disk": {"num_csx": 2, **DISK}}
place = None if PLANS[kind] is None else hw.backend("CSX", **PLANS[kind])  # before TrainingArguments

import lightning.pytorch as pl  # noqa: E402
import torch  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from torch.nn.functional import mse_loss  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402
from trainers import VALIDATION, gpt2_with, history, trainer_of  # noqa: E402

from headwater.integrations.lightning import StreamedStrategy  # noqa: E402

EVERY_3 = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3}


def weights_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def train(resume=None):
    """Train with the Trainer; return its logs and the sum of its predictions, and the weights."""
    model = gpt2_with(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)  # ranks draw different dropout masks
    trainer = trainer_of(place, folder, model, max_steps=6, **EVERY_3)
    trainer.train(resume_from_checkpoint=resume)
    predictions = float(trainer.predict(VALIDATION[:17]).predictions.sum())
    return [history(trainer), predictions], weights_of(trainer.model)


def train_in_a_loop():
    """Train in a loop of accelerate; return the losses, and the weights."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loader = DataLoader(torch.randn(32, 8), batch_size=4)
    accelerator = Accelerator(cpu=True)
    optimizer, batches = accelerator.prepare(optimizer, loader)
    if place is None:
        model = accelerator.prepare(model)
    else:
        model = accelerator.prepare_model(hw.compile(model, place), evaluation_mode=True)
        batches = hw.utils.data.DataExecutor(batches, num_steps=4, sharded=True)
    losses = []
    for batch in batches:
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    return losses, weights_of(accelerator.unwrap_model(model))


class Regression(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def loss(self, batch, name):
        loss = mse_loss(self.model(batch[0]), batch[1])
        self.log(name, loss, sync_dist=True, on_epoch=True)
        return loss

    def training_step(self, batch, _):
        return self.loss(batch, "training")

    def validation_step(self, batch, _):
        return self.loss(batch, "validation")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def train_with_lightning():
    """Train with Lightning; return the logged values and the names of its checkpoints, and the weights."""
    torch.manual_seed(0)
    module, inputs = Regression(), torch.randn(37, 8)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4, shuffle=True)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2 if place is None else 1,
        strategy="ddp" if place is None else StreamedStrategy(place),
        max_epochs=2,
        gradient_clip_val=0.5,
        callbacks=[ModelCheckpoint(folder / "lightning", save_top_k=-1)],
        logger=False,
    )
    trainer.fit(module, loader, loader)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return [logged, sorted(path.name for path in (folder / "lightning").iterdir())], weights_of(module)


checkpoint = str(folder.parent / "plain" / "checkpoint-3")
if place is None:
    whole, resumed = train(), train(checkpoint)
else:
    resumed, whole = train(checkpoint), train()  # resumes first, as a new process does
seen, weights = zip(whole, resumed, train_in_a_loop(), train_with_lightning(), strict=True)
if Accelerator().is_main_process:
    (folder / "seen.json").write_text(json.dumps(seen))
    torch.save(weights, folder / "weights.pt")
