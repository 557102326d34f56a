"""The torch-mirroring API: compile, trace, closures, checkpoints, on top of the streaming engine."""
