"""What reads checkpoints, and writes them in other forms."""
