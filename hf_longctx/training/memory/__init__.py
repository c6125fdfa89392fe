"""What a rank keeps of a micro-batch for backward, where, and what to do when memory runs out."""
