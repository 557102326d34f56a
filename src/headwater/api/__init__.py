"""The API for a user's training loop: compile, trace, closures and checkpoints. It mirrors torch's."""
