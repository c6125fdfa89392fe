"""Planned steps: of processes that hold all layers, and of the stages of a pipeline."""
