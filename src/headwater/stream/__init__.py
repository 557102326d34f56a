"""The executor: brings weights to the device and gradients to the store while the model computes."""
