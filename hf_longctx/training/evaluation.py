"""A trainer's evaluation: loss, and token metrics, per label token of planned steps: the same numbers on any number of ranks."""

from contextlib import nullcontext
from typing import Any, NoReturn

import torch

from hf_longctx.checkpoint.checkpoints import Checkpoints
from hf_longctx.data.loader import NotWanted, PlannedDataLoader
from hf_longctx.models.loss.token_metrics import TokenMetrics, forward_arguments, means
from hf_longctx.parallel.reduction import agree_on_plan, sum_step
from hf_longctx.parallel.sharding import is_sharded
from hf_longctx.training.arguments import refuse_other_batch
from hf_longctx.training.steps.work import Work


def mean_metrics(trainer: Any, dataloader: PlannedDataLoader) -> dict[str, float]:
    """Return the loss per label token over all documents, without a router's auxiliary loss, under `loss`; with the setting
    `token_metrics` those of models/loss/token_metrics.py too. Collective."""
    if trainer.is_fsdp_enabled and not is_sharded(trainer.model):  # before training, which would shard it
        trainer.create_optimizer()
        trainer.model, trainer.optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
        trainer.model_wrapped = trainer.model
    device, model, progress = trainer.args.device, trainer.accelerator.unwrap_model(trainer.model), trainer.progress
    model.eval()
    if callable(getattr(trainer.optimizer, "eval", None)):
        trainer.optimizer.eval()
    trainer.callback_handler.eval_dataloader = dataloader
    sharded = trainer.sharded_model(model)
    token_metrics = TokenMetrics(device) if trainer.plugin.token_metrics else None
    work = Work(router_loss=False, sharded=sharded, arguments=forward_arguments(token_metrics))
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    with progress.evaluation():
        try:
            for step in dataloader:
                refuse_other_batch(step)
                progress.begin("agreeing on the plan", collective=True)
                if agree_on_plan(step.fingerprint, device, trainer.checkpoints.termination.requested):
                    _leave(trainer)
                # Weights under FSDP2 are in the dtype they compute in already.
                with torch.no_grad(), nullcontext() if sharded is not None else trainer.accelerator.autocast():
                    loss = trainer.steps.run(model, step, work)
                totals += torch.stack([loss * step.num_items, torch.tensor(float(step.num_items), device=device)])
                trainer.control = trainer.callback_handler.on_prediction_step(
                    trainer.args, trainer.state, trainer.control
                )
                progress.begin("loading data")
        except NotWanted:
            progress.begin("agreeing on the plan", collective=True)
            agree_on_plan(0, device, leave=True)
            _leave(trainer)
        progress.begin("summing losses", collective=True)
        own_sums = totals[:1] if token_metrics is None else torch.cat([totals[:1], token_metrics.take()])
        sums = sum_step([], own_sums) / trainer.world.tensor_parallel
    loss = {"loss": float(sums[0] / totals[1])}
    return loss if token_metrics is None else loss | means(sums[1:])


def _leave(trainer: Any) -> NoReturn:
    """End the program because of a SIGTERM during evaluation: the next start does it again, all of it, before anything else."""
    if trainer.run_state is not None:
        trainer.run_state.evaluation_due = True
        state = trainer.state
        state.log_history = [
            entry
            for entry in state.log_history
            if entry["step"] != state.global_step or not any(name.startswith("eval_") for name in entry)
        ]
    checkpoints: Checkpoints = trainer.checkpoints
    checkpoints.leave()


def evaluate_what_is_due(trainer: Any) -> None:
    """Evaluate, if a SIGTERM ended the evaluation after the step from which the run goes on."""
    if not trainer.run_state.evaluation_due:
        return
    trainer.run_state.evaluation_due = False
    trial = getattr(trainer, "_trial", None)
    metrics = trainer._evaluate(trial, None)
    if trainer._determine_best_metric(metrics=metrics, trial=trial):
        trainer.checkpoints.note_best()
