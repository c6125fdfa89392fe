"""What starts a run, or says beforehand what one would be."""
