"""Readers of checkpoints, and writers of other forms of them."""
