"""One script on two processes: `python examples/two_ranks.py`. No launcher is needed."""

import torch

import headwater as hw

# Here the first process starts the two ranks. Each rank runs the whole script.
backend = hw.backend("CSX", num_csx=2)

torch.manual_seed(0)
blocks = (torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh()) for _ in range(4))
model = hw.compile(torch.nn.Sequential(*blocks, torch.nn.Linear(16, 4)), backend)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
inputs = torch.randn(64, 16)
data = torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(-1))
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True, drop_last=True)


@hw.trace
def training_step(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Train on this rank's half of a batch."""
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    return loss


@hw.step_closure
def show(loss: torch.Tensor) -> None:
    """Print the loss of the whole batch, on rank 0."""
    print(loss.item())


for batch, labels in hw.utils.data.DataExecutor(loader, num_steps=6):
    show(training_step(batch, labels))
