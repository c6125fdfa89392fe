"""Layouts of one micro-batch: who holds what, which blocks each rank computes, and who sends what to whom. No torch."""
