"""Builders of layouts and plans, their invariants, and pages of them."""
