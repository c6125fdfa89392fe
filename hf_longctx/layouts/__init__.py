"""Layouts of one micro-batch: the segments, blocks and messages of each rank. No torch."""
