"""Pipelines: chunks of documents, the order of their tasks on every device, and who holds which layers."""
