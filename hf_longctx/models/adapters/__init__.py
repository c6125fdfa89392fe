"""PEFT's adapters, new rows of embeddings, quantised bases."""
