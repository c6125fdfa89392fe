"""Builders of models, tokenizers, rows, files and training runs, and plain references to compare with."""
