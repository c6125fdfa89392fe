"""Patched attention classes and heads, and the functions that install them."""
