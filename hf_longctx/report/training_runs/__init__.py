"""Files, pages and cards of runs."""
