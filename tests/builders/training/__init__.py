"""Builders of runs that are sharded, cut to stages, stopped, saved or measured."""
