"""What steps cost: measured, predicted, and predicted anew while training."""
