"""Runs that are disturbed, and the programs of ranks that fail, stall or end too soon."""
