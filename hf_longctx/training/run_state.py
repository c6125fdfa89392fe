"""What a run must remember to be continued on any number of ranks, kept in the checkpoint's trainer_state.json.

The global batch is fixed at first launch: were it derived again from the number of processes, a run resumed on
another number of ranks would train on other batches. The data set's fingerprint catches a checkpoint continued on
other documents.
"""

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

from transformers.trainer_callback import ExportableState, TrainerCallback, TrainerState

from hf_longctx.data.length_index import LengthIndex


@dataclass
class RunState(TrainerCallback, ExportableState):
    """A callback only in that Trainer stores the state of its callbacks with every checkpoint."""

    global_batch_documents: int | None
    global_batch_tokens: int | None
    seed: int
    """of the order of documents"""
    data_fingerprint: str
    """of the lengths and label counts of the data set, in order"""
    skipped_steps: int = 0
    """optimizer steps skipped because of gradients that were not finite"""

    def state(self) -> dict[str, Any]:
        return {"args": asdict(self), "attributes": {}}

    def restore(self, checkpoint_state: TrainerState) -> None:
        """Takes over a checkpoint's batches, order and counter.

        Raises:
            ValueError: the checkpoint was made on other documents, or the caller asked for other batches or another
                seed.
        """
        callbacks: Any = checkpoint_state.stateful_callbacks
        stored = (callbacks or {}).get(type(self).__name__)
        if stored is None:
            raise ValueError(
                "the checkpoint's trainer_state.json holds no RunState: it was not saved by LongContextTrainer, so its global "
                "batches are unknown. Start a new run from its weights instead"
            )
        saved = RunState(**stored["args"])
        if saved.data_fingerprint != self.data_fingerprint:
            raise ValueError(
                f"the checkpoint was made on documents with fingerprint {saved.data_fingerprint}, these have "
                f"{self.data_fingerprint}: resuming would repeat some and lose others. Give the same data set in "
                "the same order, or start a new run"
            )
        self.__dict__.update(asdict(saved))


def data_fingerprint(index: LengthIndex) -> str:
    """16 hex digits of the lengths and label counts of all documents, in order."""
    digest = hashlib.blake2b(digest_size=8)
    for column in (index.lengths, index.label_tokens):
        digest.update(column.astype("<i8").tobytes())
    return digest.hexdigest()
