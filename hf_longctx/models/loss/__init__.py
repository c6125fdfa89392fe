"""From hidden states to the loss, in chunks of rows."""
