"""Plays plans on clusters that need not exist. No torch."""
