"""Evaluates a model on long documents: loss by position and length, what it finds in them, two models compared."""
