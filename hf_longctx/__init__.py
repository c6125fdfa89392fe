"""Exact, balanced fine-tuning of Hugging Face models on long and mixed-length documents."""
