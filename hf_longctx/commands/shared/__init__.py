"""What several verbs need: sizes, screens, refusals, models, rooms of memory."""
