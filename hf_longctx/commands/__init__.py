"""The verbs of the command line, one file each, and what they share: documents.py (DATA), costs.py (--model, --device)."""
