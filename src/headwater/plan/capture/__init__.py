"""Analysis of a training step without running it: operators, graphs, and parts that do not fit together."""
