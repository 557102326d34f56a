"""Bytes of each part of a plan. `Footprint` (`plan/footprint.py`) adds them up by kind of memory.

- `stages`: bytes of a stage's weights, masters, optimizer state and gradients. The other modules use them.
- `slabs`: the memory into which weights are copied for the device.
- `activations` and `gradients`: the tensors that are in memory at each use of a stage.
- `store`, `device`, `updates`: the weight store on the host and on the device, its buffers and workspaces.
- `masks`: the masks of sparse training, and the copies that they make necessary.
- `process`: the program, the weights before the store is filled, and other models of the process.
- `snapshots`: copies of stages for a checkpoint that is written during training.
"""
