"""Modules that several verbs need: sizes, screens, refusals, models, memory of a rank."""
