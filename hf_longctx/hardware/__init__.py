"""Speeds, links and memory of known devices. Nothing here needs torch."""
