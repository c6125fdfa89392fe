"""A Trainer's data loaders of planned steps, over documents that are cut and batched as the run began.

Every rank plans the same steps from the same lengths; with the plugin's loader="ray" one process plans for all, and its address
is what the first rank sends to the others. Nothing else is sent.
"""

import os
import uuid
from collections.abc import Callable
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState

from hf_longctx.data.collator import LengthAwareCollator, RankStep
from hf_longctx.data.length_index import LengthIndex, refuse_tokens_outside
from hf_longctx.data.loader import PlannedDataLoader, PlannedSteps
from hf_longctx.data.long_documents import Pieces, cut_documents
from hf_longctx.planner import GlobalBatches, Topology
from hf_longctx.planner.adjustment import Adjustments
from hf_longctx.planner.mixture import Mixture
from hf_longctx.training.costs import cost_model
from hf_longctx.training.preparation import PreparationMixin
from hf_longctx.training.recalibration import restored
from hf_longctx.training.run_state import RunState

EVALUATION_STEP_CAPACITIES = 8
"""Tokens of one evaluation step, in capacities of all ranks together: enough documents to balance, few enough to
hold."""


class PlannedDataMixin(PreparationMixin):
    """Put before a Trainer class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.run_state: Any = None
        self._last_step: tuple[RankStep, float] | None = None
        self._resuming_from: str | None = None
        self._data_wait_seconds = 0.0
        self._ray_job: str | None = None
        self._remote_names = 0
        self._training_steps: PlannedSteps | None = None
        self._evaluation_steps: dict[int, PlannedSteps] = {}
        super().__init__(*args, **kwargs)

    def planned_steps(
        self,
        dataset: Any,
        batches_of: Callable[[Pieces], GlobalBatches],
        begin: Callable[[LengthIndex], None] = lambda index: None,
    ) -> PlannedSteps:
        """Planned steps over a data set; `begin` is called before long documents are cut."""
        index = LengthIndex.from_dataset(dataset)
        refuse_tokens_outside(dataset, self.model.config.get_text_config().vocab_size)
        topology = Topology(
            world_size=self.world.ranks,
            capacity=self.plugin.capacity,
            ranks_per_node=self.exchange.ranks_per_node if self.exchange is not None else None,
            ulysses_degree=self.plugin.ulysses_degree,
            stages=self.world.stages,
        )
        half = self.args.bf16 or self.args.fp16
        cost = cost_model(
            self.plugin, self.model, topology, self.args.device, autocast=half, cpu=self.cpu, gpu=self.gpu
        )
        collator = LengthAwareCollator(
            topology, cost, self.hdp_rank, self.plugin.planner, self.world.mode, self._offload, self.steps.schedule
        )
        begin(index)
        policy, overlap = self.plugin.long_documents, self.plugin.overlap_tokens
        pieces = cut_documents(dataset, index, policy, self._longest_document(), overlap)
        steps = (dataset, pieces, batches_of(pieces), collator)
        return PlannedSteps(*steps) if self.plugin.loader == "local" else self._remote_steps(*steps)

    def _remote_steps(self, *steps: Any) -> PlannedSteps:
        """The same steps through Ray, which the first process starts or joins and the others join. Collective."""
        from hf_longctx.data.remote.client import RemoteSteps
        from hf_longctx.data.remote.cluster import RemoteError, connect

        if self._ray_job is None:
            told: dict[str, str] = {}
            if self.ranks.rank == 0:
                try:
                    told = {"address": connect(self.plugin.ray_address), "job": uuid.uuid4().hex}
                except (RemoteError, ValueError) as error:
                    told = {"problem": str(error)}
            told = self.ranks.agreed(told)
            if "problem" in told:
                raise RemoteError(told["problem"])
            connect(told["address"])
            self._ray_job = told["job"]
        self._remote_names += 1
        return RemoteSteps(
            *steps,
            job=self._ray_job,
            name=f"steps {self._remote_names}",
            servers=self.plugin.ray_servers,
            creates=self.ranks.rank == 0,
        )

    def training_steps(self) -> PlannedSteps:
        """The planned optimizer steps of this run, for training and for looking at."""
        if self._training_steps is None:
            if self.train_dataset is None:
                raise ValueError("training needs a train_dataset with a column input_ids")
            self._training_steps = self.planned_steps(self.train_dataset, self._training_batches, self._begin_run)
            cost = self._training_steps.collator.cost
            self._training_steps.adjustments = restored(self.run_state.calibration, cost, self.world.ranks)
        return self._training_steps

    def get_train_dataloader(self) -> PlannedDataLoader:
        return self._dataloader(self.training_steps())

    def get_eval_dataloader(self, eval_dataset: Any = None) -> PlannedDataLoader:
        dataset = self.eval_dataset[eval_dataset] if isinstance(eval_dataset, str) else eval_dataset
        dataset = dataset if dataset is not None else self.eval_dataset
        if dataset is None:
            raise ValueError("evaluation needs an eval_dataset with a column input_ids")
        planned = self._evaluation_steps.get(id(dataset))
        if planned is None or planned.dataset is not dataset or planned.pieces.limit != self._longest_document():
            tokens = EVALUATION_STEP_CAPACITIES * self.plugin.capacity * self.world.ranks
            planned = self.planned_steps(dataset, lambda pieces: GlobalBatches(pieces.lengths, 0, tokens=tokens))
            self._evaluation_steps[id(dataset)] = planned
        if self._last_step is not None:  # planned as the training step before it was
            now = self.training_steps().adjustments.at(*self._last_step[0].position)
            planned.adjustments = Adjustments([(0, 0, now)])
        return self._dataloader(planned)

    def _dataloader(self, steps: PlannedSteps) -> PlannedDataLoader:
        return PlannedDataLoader(
            steps,
            num_workers=self.args.dataloader_num_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            persistent_workers=self.args.dataloader_persistent_workers,
            pin_memory=self.args.dataloader_pin_memory and self.args.device.type == "cuda",
        )

    def _longest_document(self) -> int | None:
        """Tokens at which long documents are cut, once the run has begun as it began; None: they are not."""
        if self.run_state is not None:
            return self.run_state.longest_document
        return self.plugin.first_longest_document(self.world.ranks)

    def _training_batches(self, pieces: Pieces) -> GlobalBatches:
        run = self.run_state
        weights, source = run.weights, getattr(self.train_dataset, "source", None)
        mixture = None if weights is None or source is None else Mixture(source[pieces.document], weights)
        documents, tokens = run.global_batch_documents, run.global_batch_tokens
        return GlobalBatches(pieces.lengths, run.seed, documents=documents, tokens=tokens, mixture=mixture)

    def _begin_run(self, index: LengthIndex) -> None:
        """Fixes what a checkpoint must remember, the global batches among it: the plugin's, else Trainer's batch size; a
        checkpoint's when resuming."""
        documents, tokens = self.plugin.global_batch_documents, self.plugin.global_batch_tokens
        if documents is None and tokens is None:
            documents = self._default_documents
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        if self.run_state is not None:
            self.remove_callback(self.run_state)
        longest = self.plugin.first_longest_document(self.world.ranks)
        self.run_state = RunState(
            documents,
            tokens,
            seed,
            index.fingerprint,
            self.plugin.long_documents,
            longest,
            self.plugin.overlap_tokens,
            getattr(self.train_dataset, "weights", None),
            bf16=bool(self.args.bf16),
            data_version=getattr(self.train_dataset, "data_version", None),
        )
        self.add_callback(self.run_state)
        if self._resuming_from is not None:
            self.run_state.restore(
                TrainerState.load_from_json(os.path.join(self._resuming_from, TRAINER_STATE_NAME)),
                {
                    "global_batch_documents": self.plugin.global_batch_documents,
                    "global_batch_tokens": self.plugin.global_batch_tokens,
                    "seed": self.args.data_seed,
                    "long_documents": self.plugin.long_documents,
                    "longest_document": self.plugin.longest_document,
                    "overlap_tokens": self.plugin.overlap_tokens,
                },
                noise=self.args.neftune_noise_alpha if self.args.process_index == 0 else None,
            )
