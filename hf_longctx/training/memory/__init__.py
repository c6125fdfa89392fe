"""Activations that a rank keeps for backward, in device or host memory; its capacity; advice when memory runs out."""
