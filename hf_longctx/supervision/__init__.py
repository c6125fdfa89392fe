"""Progress of ranks, and what is done when one stands still or ends."""
