"""The executor: weights in, gradients out, while the model computes."""
