"""Pictures a person looks at."""
