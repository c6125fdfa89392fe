"""Costs of steps: measured, predicted, and predicted anew while training."""
