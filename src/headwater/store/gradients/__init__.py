"""Gradients from backward to the update: summed over micro-batches, ranks and hosts, measured and edited.

`port` says what a store and a user's loop may do; `headwater.store.build` chooses the implementation:

| ranks | `train_step` | a user's loop |
|---|---|---|
| one | `LocalGradients` | `LocalGradients` |
| several on one host | `RankGradients` | `LoopGradients` |
| several hosts | `HostGradients`, around `RankGradients` | `LoopGradients`, with a `HostAssembly` |
"""
