"""What a rank's memory holds: weights, gradients, optimizer, activations, and what is no tensor's."""
