"""What saving a checkpoint costs training, and what SIGKILL in the middle of saving leaves.

    python benchmarks/checkpoint.py --check

1. Two ranks train a Llama of 69M weights (0.8 GB with Adam's state) and save every second step, in turn waiting for each
   checkpoint and writing it in the background. Figure: how long training waits for a save, over what it waits for a blocking one.
2. Two ranks do nothing but save, 64 MB at a time; after a random time one rank or both are killed. Each time, the newest
   checkpoint must be valid and hold what was saved under its number, and none may be older than what was complete before.
"""

import argparse
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from benchmarks import report  # noqa: E402
from benchmarks.ranks import on_ranks  # noqa: E402
from hf_longctx.checkpoint import folder as folders  # noqa: E402
from hf_longctx.checkpoint.rank_messages import Ranks  # noqa: E402
from hf_longctx.checkpoint.reader import CheckpointReader  # noqa: E402
from hf_longctx.checkpoint.writer import CheckpointWriter, Contents  # noqa: E402

TOKENS = 512
"""of an optimizer step: it takes longer than the copy to host memory, as steps do."""
SAVE_STEPS, STEPS = 2, 6


# How long training waits


def waits(rounds: int, sharding: str) -> dict[bool, list[float]]:
    """On each rank: seconds of each save that training waited; [in the background?]."""
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM

    from hf_longctx import LongContextPlugin, LongContextTrainer
    from tests.builders.training_runs import arguments, fresh_accelerator_state

    config = LlamaConfig(
        hidden_size=768, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=12, vocab_size=8192
    )
    rows = [{"input_ids": [1 + number] * (TOKENS // 4)} for number in range(4 * STEPS)]
    seconds_of: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds):
        for in_background in (True, False) if number % 2 else (False, True):
            with tempfile.TemporaryDirectory() as made:
                folder = Ranks().agreed(made)
                fresh_accelerator_state()
                trainer = LongContextTrainer(
                    model=LlamaForCausalLM(config),
                    args=arguments(folder, max_steps=STEPS, save_strategy="steps", save_steps=SAVE_STEPS),
                    train_dataset=Dataset.from_list(rows),
                    plugin=LongContextPlugin(
                        capacity=TOKENS, global_batch_documents=4, sharding=sharding, async_save=in_background
                    ),
                )
                trainer.train()
                waited = [entry["save_seconds"] for entry in trainer.state.log_history if "save_seconds" in entry]
                # A step is logged before it is saved, and the copy is waited for in the next.
                seconds_of[in_background] += [
                    waited[step + 1] - waited[step - 1] for step in range(SAVE_STEPS, STEPS - 1, SAVE_STEPS)
                ]
    return seconds_of


# What a kill leaves


def saves_forever(rank: int, port: int, output: Path, first: int) -> None:
    """Saves tensors full of a number under that number, then the next, until killed. What a rank says of its peer's death is
    not looked at."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    writer = CheckpointWriter(Ranks())
    for number in range(first, 2**30):
        weights = {f"{name}.weight": torch.full((1024, 2048), float(number)) for name in "abcd"}
        optimizer = {f"exp_avg/{name}": (name, torch.full_like(weight, number)) for name, weight in weights.items()}
        contents = Contents(
            number, number, "ddp", weights, optimizer, b"{}", {"step.json": f"{number}"}, lambda *_: None
        )
        writer.save(contents, output / f"{folders.PREFIX}{number}", lambda final: folders.rotate(final, 2, None))


def newest_saved(output: Path) -> int:
    """The step of the newest checkpoint, which must hold that number everywhere; 0: there is none."""
    checkpoints = folders.checkpoints(output)
    for checkpoint in checkpoints:
        if problem := folders.problem_of(checkpoint):
            raise AssertionError(f"a visible checkpoint is damaged: {problem}")
    if not checkpoints:
        return 0
    weights = {f"{name}.weight": torch.empty(1024, 2048) for name in "abcd"}
    reader = CheckpointReader(checkpoints[0])
    reader.read_weights(weights)
    number = folders.step_of(checkpoints[0])
    kept = reader.manifest.optimizer or {}
    state = [reader.read_state(key, entry, weights["a.weight"]) for key, entry in kept.items()]
    if any(tensor.unique().tolist() != [number] for tensor in [*weights.values(), *state]):
        raise AssertionError(f"{checkpoints[0]} does not hold {number} everywhere")
    return int(number or 0)


def killed(times: int, seed: int) -> dict[str, float]:
    """Kills saving ranks so many times; how often what was left was not as it must be, and how it was."""
    drawn = random.Random(seed)
    os.environ["PYTHONPATH"] = str(ROOT)
    forkserver.set_forkserver_preload(["benchmarks.checkpoint"])
    context = multiprocessing.get_context("forkserver")
    bad = leftovers = 0
    last = 0
    with tempfile.TemporaryDirectory() as made:
        output = Path(made)
        for number in range(times):
            folders.remove_leftovers(output)
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            ranks = [
                context.Process(target=saves_forever, args=(rank, store.port, output, last + 1)) for rank in range(2)
            ]
            for rank in ranks:
                rank.start()
            wait_until(lambda: any(output.glob(f"{folders.WRITING}*")) or bool(folders.checkpoints(output)))
            time.sleep(drawn.uniform(0.0, 2.0))
            chosen = drawn.choice([ranks, ranks[:1], ranks[1:]])
            for rank in chosen:
                os.kill(rank.pid or 0, signal.SIGKILL)
            time.sleep(0.1)
            for rank in ranks:
                rank.kill()
                rank.join()
            leftovers += any(output.glob(f"{folders.WRITING}*"))
            try:
                newest = newest_saved(output)
                if newest < last:
                    raise AssertionError(f"the newest checkpoint is {newest}, and {last} was complete before")
                last = newest
            except (AssertionError, folders.CheckpointError) as error:
                bad += 1
                print(f"kill {number}: {error}", file=sys.stderr)
                shutil.rmtree(output)
                output.mkdir()
                last = 0
    return {"bad": bad, "while writing": leftovers, "checkpoints": last}


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing was saved within {seconds:g} s")
        time.sleep(0.01)


def main() -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="save so often in each way")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments: argparse.Namespace = parser.parse_args()
    load = os.getloadavg()[0]
    figures: dict[str, float] = {}
    rows: list[dict[str, str]] = []
    more: dict[str, Any] = {}
    for sharding in ("ddp", "zero3"):
        seconds_of = on_ranks(waits, 2, arguments.rounds, sharding)[0]
        typical = {way: statistics.median(seconds) for way, seconds in seconds_of.items()}
        figures[f"{sharding}/wait for a save over a blocking save's"] = ratio = typical[True] / typical[False]
        more[sharding] = {"in the background": seconds_of[True], "blocking": seconds_of[False]}
        rows.append({"what": f"{sharding}: training waits, over a blocking save", "figure": f"{ratio:.4f}"})
    kills = killed(arguments.kills, arguments.seed)
    figures["kills"] = arguments.kills
    figures["kills/invalid or lost checkpoints"] = kills["bad"]
    rows.append({"what": f"{arguments.kills} kills, invalid or lost checkpoints", "figure": f"{kills['bad']:.0f}"})
    rows.append(
        {"what": f"{arguments.kills} kills, in the middle of writing", "figure": f"{kills['while writing']:.0f}"}
    )
    return report.conclude(arguments, rows, figures, load, seconds=more, kills=kills)


if __name__ == "__main__":
    raise SystemExit(main())
