"""What can be known of a training step before it runs: operators, graphs, and what does not go together."""
