"""How processes are arranged, and what each holds of a model."""
