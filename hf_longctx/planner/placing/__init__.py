"""Placements of documents on ranks and in time: several ways, and the search that chooses."""
