"""Bytes of a rank's memory: weights, gradients, optimizer, activations, and all that is no tensor."""
