"""Pipelines: chunks of documents, the order of their tasks on every device, and the layers of each stage."""
