"""What the server that ranks are forked from imports (rank_launcher.py): all that a rank needs."""

from tests.builders.tiny_models import tiny_llama
from tests.worlds import garbage
from tests.worlds.faults.faulty_run import train

__all__ = ["tiny_llama", "train"]

garbage.freeze()  # ranks collect their trainers (attention/groups.py), and need not look through what is imported here
