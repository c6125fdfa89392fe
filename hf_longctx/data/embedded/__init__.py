"""Weights and texts from installed packages, for machines without a network."""
