"""Planners of others, for comparisons: no setting of a training run reaches them."""
