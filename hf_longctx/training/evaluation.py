"""A Trainer's evaluation: the loss per label token of planned steps, the same number on any number of ranks."""

from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from transformers.trainer_utils import EvalLoopOutput

from hf_longctx.data.loader import PlannedDataLoader
from hf_longctx.training.planned_data import PlannedDataMixin
from hf_longctx.training.reduction import agree_on_plan, sum_step
from hf_longctx.training.sharding import is_sharded
from hf_longctx.training.steps.work import Work


class EvaluationMixin(PlannedDataMixin):
    """Put before a Trainer class."""

    control: Any
    optimizer: Any

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Refused with a ValueError: it would return the logits of all documents."""
        raise ValueError(
            "predict() returns the logits of all documents, which are never materialised. Valid: evaluate(), or a plain model "
            "over the checkpoint"
        )

    def evaluation_loop(
        self,
        dataloader: PlannedDataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Loss per label token over all documents: the same number on any number of ranks. A router's auxiliary loss
        is left out.
        """
        if self.is_fsdp_enabled and not is_sharded(self.model):  # before training, which would shard it
            self.create_optimizer()
            self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
            self.model_wrapped = self.model
        device, model = self.args.device, self.accelerator.unwrap_model(self.model)
        model.eval()
        if callable(getattr(self.optimizer, "eval", None)):
            self.optimizer.eval()
        self.callback_handler.eval_dataloader = dataloader
        sharded = self._sharded_model(model)
        work = Work(router_loss=False, sharded=sharded)
        totals = torch.zeros(2, dtype=torch.float64, device=device)
        with self.progress.evaluation():
            for step in dataloader:
                self.progress.begin("agreeing on the plan", collective=True)
                if agree_on_plan(step.fingerprint, device, self.termination.requested):
                    self._leave_evaluation()
                # Weights under FSDP2 are in the dtype they compute in already.
                with torch.no_grad(), nullcontext() if sharded is not None else self.accelerator.autocast():
                    loss = self.steps.run(model, step, work)
                totals += torch.stack([loss * step.num_items, torch.tensor(float(step.num_items), device=device)])
                self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
                self.progress.begin("loading data")
            self.progress.begin("summing losses", collective=True)
            loss_sum = sum_step([], totals[:1]) / self.world.tensor_parallel
        metrics = {f"{metric_key_prefix}_loss": float(loss_sum / totals[1])}
        none: Any = None
        return EvalLoopOutput(none, none, metrics, num_samples=self.num_examples(dataloader))

    def _leave_evaluation(self) -> NoReturn:
        """SIGTERM during evaluation: the next start does it again, all of it, before anything else."""
        if self.run_state is not None:
            self.run_state.evaluation_due = True
            step = self.state.global_step
            self.state.log_history = [
                entry
                for entry in self.state.log_history
                if entry["step"] != step or not any(name.startswith("eval_") for name in entry)
            ]
        self._leave()

    def _evaluate_what_is_due(self) -> None:
        if not self.run_state.evaluation_due:
            return
        self.run_state.evaluation_due = False
        trial = getattr(self, "_trial", None)
        metrics = self._evaluate(trial, None)
        if self._determine_best_metric(metrics=metrics, trial=trial):
            self._note_best()
