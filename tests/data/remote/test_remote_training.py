"""Training through Ray: the same losses as with the local loader, also where the planner and a server are killed."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from hf_longctx.data.remote.cluster import RemoteError
from tests.builders.training_runs import Run, assembled, documents, train
from tests.worlds.rank_pool import RankPool

LENGTHS = [30, 7, 21, 12, 40, 3, 18, 25, 9, 33]
PLUGIN: dict[str, Any] = {"capacity": 40, "global_batch_documents": 3}
EPOCHS = 2


class Kills(TrainerCallback):
    """Kills the planner in the first epoch, and the server in the second."""

    def on_step_end(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
        steps = train_dataloader.dataset
        if args.process_index == 0 and state.global_step in (2, 5):
            killed = steps.planner_report() if state.global_step == 2 else steps.server_report()
            os.kill(killed.process, signal.SIGKILL)


def run(output: str, loader: str) -> Run:
    settings = {"output_dir": output, "num_train_epochs": EPOCHS}
    if loader == "local":
        return train("llama", documents(LENGTHS), PLUGIN, settings, eval_rows=documents(LENGTHS[:4]))
    from hf_longctx.data.remote.cluster import disconnect

    try:
        plugin = PLUGIN | {"loader": "ray", "ray_servers": 2}
        rows = documents(LENGTHS)
        return train("llama", rows, plugin, settings, eval_rows=documents(LENGTHS[:4]), callbacks=[Kills()])
    finally:
        disconnect()


def test_losses_and_documents_are_those_of_the_local_loader_whoever_is_killed(ranks2: RankPool, tmp_path: Path):
    local = ranks2.run(run, str(tmp_path / "local"), "local")
    remote = ranks2.run(run, str(tmp_path / "ray"), "ray")
    for ours, theirs in zip(remote, local, strict=True):
        assert ours.series("loss") == theirs.series("loss")
        assert ours.evaluation["eval_loss"] == theirs.evaluation["eval_loss"]
        assert ours.held == theirs.held
    expected = sorted(row["input_ids"] for row in documents(LENGTHS))
    steps = [assembled(segments) for segments in zip(*(trained.held for trained in remote))]
    for epoch in (steps[:4], steps[4:8]):
        assert sorted(document for step in epoch for document in step) == expected


def refused(output: str, plugin: dict[str, Any]) -> tuple[str, list[str]]:
    """Return what is said, and what the watchdog adds."""
    with pytest.raises(RemoteError) as error:
        train("llama", documents(LENGTHS), PLUGIN | plugin, {"output_dir": output})
    return str(error.value), getattr(error.value, "__notes__", [])


def test_all_ranks_say_that_no_ray_answers(ranks2: RankPool, tmp_path: Path):
    """At once: it is no rank that is lost."""
    for message, added in ranks2.run(refused, str(tmp_path), {"loader": "ray", "ray_address": "127.0.0.1:1"}):
        assert "no Ray answers at 127.0.0.1:1" in message
        assert added == []
