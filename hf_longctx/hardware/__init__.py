"""Devices and their speeds, sizes and FLOPs of models, and profiles of machines. No torch."""
