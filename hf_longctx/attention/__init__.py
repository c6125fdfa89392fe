"""Runs a Layout: attention across ranks."""
