"""Checkpoints that outlast crashes: written in parallel, whole or not at all, read by any number of ranks."""
