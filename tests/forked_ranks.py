"""What the server that ranks are forked from imports (rank_launcher.py): all that a rank needs."""

import gc

from tests.faulty_run import train
from tests.tiny_models import tiny_llama

__all__ = ["tiny_llama", "train"]

gc.collect()
gc.freeze()  # ranks collect their trainers (attention/groups.py), and need not look through all that is imported here
gc.set_threshold(700, 10, 100)  # nor is much else old: Python would look through everything again and again
