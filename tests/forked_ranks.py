"""What the server that ranks are forked from imports (rank_launcher.py): all that a rank needs."""

from tests import garbage
from tests.faulty_run import train
from tests.tiny_models import tiny_llama

__all__ = ["tiny_llama", "train"]

garbage.freeze()  # ranks collect their trainers (attention/groups.py), and need not look through what is imported here
