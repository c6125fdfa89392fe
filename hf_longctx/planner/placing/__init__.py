"""Where documents lie, and when: ways of placing them, and the search that chooses."""
