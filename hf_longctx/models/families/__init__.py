"""Families with attention classes of ours."""
