"""Scoring, prefilling and evaluation across ranks."""
