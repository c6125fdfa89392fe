"""The verbs of the command line, one file each, and what they share: shared/documents.py (DATA), shared/costs.py (--model,
--device)."""
