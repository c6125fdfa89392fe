"""What documents cost on ranks: the model, how it is fitted, corrected while training, and what host memory is worth."""
