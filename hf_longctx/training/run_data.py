"""The data of a run: planned steps over documents that are cut and batched as the run began, and their data loaders.

Every rank plans the same steps from the same lengths; with the plugin's loader="ray" one process plans for all, and its address
is what the first rank sends to the others. Nothing else is sent.
"""

import math
import os
import time
import uuid
import warnings
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState
from transformers.utils import logging

from hf_longctx.checkpoint.adapter_weights import base_sample
from hf_longctx.data.collator import LengthAwareCollator, RankStep
from hf_longctx.data.length_index import LengthIndex, refuse_tokens_outside, sample_of
from hf_longctx.data.loader import PlannedDataLoader, PlannedSteps
from hf_longctx.data.long_documents import Pieces, cut_documents, other_policies
from hf_longctx.data.page_cache import MappedFiles
from hf_longctx.data.prepared import PreparedDataset, compare_tokenizer
from hf_longctx.data.step_plans import OF_EVALUATION
from hf_longctx.models.documents import documents_of, longest_of, refuse_beyond_positions
from hf_longctx.models.stages import whole_parameters
from hf_longctx.planner import GlobalBatches, PlanError, Topology
from hf_longctx.planner.cost.adjustment import Adjustments
from hf_longctx.planner.mixture import Mixture
from hf_longctx.settings.longctx import LongContextPlugin
from hf_longctx.training.measuring.recalibration import restored
from hf_longctx.training.measuring.step_costs import cost_model
from hf_longctx.training.run_state import OPTIMIZER_SETTINGS, RunState, optimizer_arguments, schedule_in_words

logger = logging.get_logger(__name__)

EVALUATION_STEP_CAPACITIES = 8
"""Tokens of one evaluation step, in capacities of all ranks together: enough documents to balance, few enough to
hold."""


class RunData:
    """Plans the steps of a trainer's run, for training and evaluation.

    Args:
        trainer: whose documents are planned; asked for its settings when they are needed.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.state: Any = None
        """RunState: what a checkpoint remembers of the run; None before the first steps are planned"""
        self.resuming_from: str | None = None
        """folder of the checkpoint that training goes on from"""
        self.last_step: RankStep | None = None
        """the one that was trained last"""
        self._files: MappedFiles | None = None
        self._ray_job: str | None = None
        self._remote_names = 0
        self._training_steps: PlannedSteps | None = None
        self._evaluation_steps: dict[int, PlannedSteps] = {}

    def begin(self, resuming_from: str | None) -> None:
        """Forget planned steps: a checkpoint decides what the global batches are."""
        self.resuming_from, self._training_steps = resuming_from, None

    def planned_steps(
        self,
        dataset: Any,
        batches_of: Callable[[Pieces], GlobalBatches],
        begin: Callable[[LengthIndex], None] = lambda index: None,
    ) -> PlannedSteps:
        """Plan steps over a data set; `begin` is called before long documents are cut."""
        trainer, plugin = self._trainer, self._trainer.plugin
        self._compare_tokenizer(dataset)
        vocabulary = trainer.model.config.get_text_config().vocab_size
        index = LengthIndex.from_dataset(dataset, vocabulary)
        refuse_tokens_outside(dataset, vocabulary)
        topology = Topology(
            world_size=trainer.world.ranks,
            capacity=plugin.capacity,
            ranks_per_node=trainer.exchange.ranks_per_node if trainer.exchange is not None else None,
            ulysses_degree=plugin.ulysses_degree,
            stages=trainer.world.stages,
            documents=documents_of(trainer.model),
        )
        half = trainer.args.bf16 or trainer.args.fp16
        cost = cost_model(
            plugin, trainer.model, topology, trainer.args.device, autocast=half, cpu=trainer.cpu, gpu=trainer.gpu
        )
        collator = LengthAwareCollator(
            topology,
            cost,
            trainer.hdp_rank,
            plugin.planner,
            trainer.world.mode,
            trainer.offload,
            trainer.steps.schedule,
        )
        begin(index)
        policy, overlap = plugin.long_documents, plugin.overlap_tokens
        pieces = cut_documents(dataset, index, policy, self._longest_document(), overlap)
        refuse_pieces_beyond_positions(trainer.model, pieces)
        steps = (dataset, pieces, batches_of(pieces), collator)
        return PlannedSteps(*steps) if plugin.loader == "local" else self._remote_steps(*steps)

    def _compare_tokenizer(self, dataset: Any) -> None:
        """Compare the trainer's tokenizer with that of a prepared folder, unless that was done when it was opened."""
        if not isinstance(dataset, PreparedDataset) or dataset.compared:
            return
        tokenizer = self._trainer.processing_class
        with warnings.catch_warnings():
            if self._trainer.args.process_index:
                warnings.simplefilter("ignore")  # rank 0 says it
            compare_tokenizer(dataset.directory, tokenizer if isinstance(tokenizer, PreTrainedTokenizerBase) else None)
        dataset.compared = True

    def _remote_steps(self, *steps: Any) -> PlannedSteps:
        """Plan the same steps through Ray, which the first process starts or joins and the others join. Collective."""
        from hf_longctx.data.remote.client import RemoteSteps
        from hf_longctx.data.remote.cluster import RemoteError, connect

        trainer = self._trainer
        if self._ray_job is None:
            told: dict[str, str] = {}
            ranks = trainer.checkpoints.ranks
            if ranks.rank == 0:
                try:
                    told = {"address": connect(trainer.plugin.ray_address), "job": uuid.uuid4().hex}
                except (RemoteError, ValueError) as error:
                    told = {"problem": str(error)}
            told = ranks.agreed(told)
            if "problem" in told:
                raise RemoteError(told["problem"])
            connect(told["address"])
            self._ray_job = told["job"]
        self._remote_names += 1
        return RemoteSteps(
            *steps,
            job=self._ray_job,
            name=f"steps {self._remote_names}",
            servers=trainer.plugin.ray_servers,
            creates=trainer.checkpoints.ranks.rank == 0,
        )

    def training_steps(self) -> PlannedSteps:
        """Return the planned optimizer steps of this run, for training and for looking at."""
        if self._training_steps is None:
            trainer = self._trainer
            if trainer.train_dataset is None:
                raise ValueError("training needs a train_dataset with a column input_ids")
            self._training_steps = self.planned_steps(trainer.train_dataset, self.training_batches, self._begin_run)
            self._files = MappedFiles(trainer.train_dataset)
            cost = self._training_steps.collator.cost
            self._training_steps.adjustments = restored(self.state.calibration, cost, trainer.world.ranks)
        return self._training_steps

    def say_changed_files(self) -> None:
        """Say on rank 0 which files of the documents were written into since the run began, once for each change."""
        if self._files is None or self._trainer.args.process_index:
            return
        for path in self._files.changed():
            logger.warning(
                f"{path} was written into while this run reads it (at {time.ctime(os.path.getmtime(path))}): documents that were "
                "read from it after that may be others than those that were planned. Valid: the file as it was, and a checkpoint "
                "from before that time to go on from"
            )

    def training_loader(self) -> PlannedDataLoader:
        """Load the steps of training."""
        return self._dataloader(self._trainer.training_steps())

    def evaluation_loader(self, eval_dataset: Any = None) -> PlannedDataLoader:
        """Load the steps of a data set, one by name, or the trainer's."""
        trainer = self._trainer
        if isinstance(eval_dataset, str):
            named = trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else {}
            if eval_dataset not in named:
                raise ValueError(
                    f"no data set of this trainer is named {eval_dataset!r}. Valid: {', '.join(map(repr, named)) or 'a data set'}"
                )
            eval_dataset = named[eval_dataset]
        dataset = eval_dataset
        dataset = dataset if dataset is not None else trainer.eval_dataset
        if dataset is None:
            raise ValueError("evaluation needs an eval_dataset with a column input_ids")
        planned = self._evaluation_steps.get(id(dataset))
        if planned is None or planned.dataset is not dataset or planned.pieces.limit != self._longest_document():
            tokens = EVALUATION_STEP_CAPACITIES * trainer.plugin.capacity * trainer.world.ranks
            try:
                planned = self.planned_steps(dataset, lambda pieces: GlobalBatches(pieces.lengths, 0, tokens=tokens))
            except ValueError as error:
                kind = PlanError if isinstance(error, PlanError) else ValueError
                raise kind(f"{OF_EVALUATION}{error}") from error
            self._evaluation_steps[id(dataset)] = planned
        if self.last_step is not None:  # planned as the training step before it was
            now = trainer.training_steps().adjustments.at(*self.last_step.position)
            planned.adjustments = Adjustments([(0, 0, now)])
        return self._dataloader(planned)

    def _dataloader(self, steps: PlannedSteps) -> PlannedDataLoader:
        args, termination = self._trainer.args, self._trainer.checkpoints.termination
        steps.told_to_end = lambda: termination.requested
        return PlannedDataLoader(
            steps,
            num_workers=args.dataloader_num_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            persistent_workers=args.dataloader_persistent_workers,
            multiprocessing_context=args.dataloader_multiprocessing_context if args.dataloader_num_workers else None,
            pin_memory=args.dataloader_pin_memory and args.device.type == "cuda",
        )

    def _longest_document(self) -> int | None:
        """Return the tokens at which long documents are cut, once the run has begun as it began; None: they are not."""
        if self.state is not None:
            return self.state.longest_document
        return self._first_longest_document()

    def _first_longest_document(self) -> int | None:
        """Return the tokens at which a run that begins now cuts long documents; None: they are not cut."""
        trainer = self._trainer
        model = trainer.model
        return trainer.plugin.first_longest_document(trainer.world.ranks, documents_of(model), longest_of(model))

    def training_batches(self, pieces: Pieces) -> GlobalBatches:
        """Group what documents have become into the global batches of training."""
        run = self.state
        mixture = mixture_of(self._trainer.train_dataset, run.weights, pieces)
        documents, tokens = run.global_batch_documents, run.global_batch_tokens
        return GlobalBatches(pieces.lengths, run.seed, documents=documents, tokens=tokens, mixture=mixture)

    def _begin_run(self, index: LengthIndex) -> None:
        """Fix what a checkpoint must remember, the global batches among it: the plugin's, else Trainer's batch size; a
        checkpoint's when resuming."""
        trainer, plugin, args = self._trainer, self._trainer.plugin, self._trainer.args
        documents, tokens = plugin.global_batch_documents, plugin.global_batch_tokens
        if documents is None and tokens is None:
            documents = trainer.default_documents
        seed = seed_of_documents(args)
        if self.state is not None:
            trainer.remove_callback(self.state)
        longest = self._first_longest_document()
        self.state = new_state(plugin, args, trainer.model, trainer.train_dataset, index, (documents, tokens), longest)
        self.state.base = base_sample(trainer.model) if args.process_index == 0 else None
        trainer.add_callback(self.state)
        if self.resuming_from is not None:
            restore_from(self.resuming_from, self.state, plugin, args)
            if args.process_index == 0 and self.state.seed != seed:
                logger.warning_once(
                    f"the order of documents stays that of seed {self.state.seed}, as the checkpoint has it: seed={seed} only "
                    "sets that of a new run"
                )
            if args.process_index == 0 and self.state.global_batch_documents not in (None, documents):
                logger.warning(
                    f"the global batch stays {self.state.global_batch_documents} documents, as the checkpoint has it: "
                    f"per_device_train_batch_size, ranks and gradient_accumulation_steps would make {documents} now, and only "
                    "set that of a new run"
                )


def new_state(
    plugin: LongContextPlugin,
    args: Any,
    model: Any,
    dataset: Any,
    index: LengthIndex,
    batch: tuple[int | None, int | None],
    longest: int | None,
) -> RunState:
    """Return what a checkpoint must remember of a run that begins now; hashes of the weights under adapters are left out.

    Args:
        batch: documents and tokens of a global batch, of which one is None.
        longest: tokens at which long documents are cut; None: they are not.
    """
    return RunState(
        *batch,
        seed_of_documents(args),
        index.fingerprint,
        plugin.long_documents,
        longest,
        plugin.overlap_tokens,
        getattr(dataset, "weights", None),
        bf16=bool(args.bf16),
        fp16=bool(args.fp16),
        frozen=frozen_dtypes(model),
        data_version=getattr(dataset, "data_version", None),
        optimizer={name: float(getattr(args, name)) for name in OPTIMIZER_SETTINGS},
        schedule=schedule_in_words(args),
        arguments=optimizer_arguments(args, plugin),
        documents=None if index.content else sample_of(dataset),
    )


def restore_from(folder: str, state: RunState, plugin: LongContextPlugin, args: Any) -> None:
    """Let a run go on as its checkpoint says. Raises ValueError where it was asked for otherwise (RunState.restore)."""
    state.restore(
        TrainerState.load_from_json(os.path.join(folder, TRAINER_STATE_NAME)),
        {
            "global_batch_documents": plugin.global_batch_documents,
            "global_batch_tokens": plugin.global_batch_tokens,
            "seed": args.data_seed,
            "long_documents": plugin.long_documents,
            "longest_document": plugin.longest_document,
            "overlap_tokens": plugin.overlap_tokens,
        },
        noise=args.neftune_noise_alpha if args.process_index == 0 else None,
    )


def seed_of_documents(args: Any) -> int:
    """Return the seed of the order of a new run's documents."""
    return int(args.seed if args.data_seed is None else args.data_seed)


def mixture_of(dataset: Any, weights: Any, pieces: Pieces) -> Mixture | None:
    """Return the mixture that global batches are drawn from; None: a data set of one source, or without weights."""
    source = getattr(dataset, "source", None)
    return None if weights is None or source is None else Mixture(source[pieces.document], weights)


def frozen_dtypes(model: Any) -> str | None:
    """Name the dtypes of the weights that adapters stand on, the same on all stages of a pipeline; None: there are none."""
    if not getattr(model, "peft_config", None):
        return None
    frozen = {str(weight.dtype) for weight in whole_parameters(model).values() if not weight.requires_grad}
    return " and ".join(sorted(name.removeprefix("torch.") for name in frozen))


def refuse_pieces_beyond_positions(model: Any, pieces: Pieces) -> None:
    """Raise ValueError for the longest of the texts to train on, if the model has not enough positions for it."""
    most = longest_of(model)
    if most is None:
        return
    piece = int(pieces.lengths.argmax())
    length, document = int(pieces.lengths[piece]), f"document {pieces.document[piece]}"
    refuse_beyond_positions(
        model,
        length,
        f"a piece of {document}" if pieces.is_part(piece) else document,
        f": longctx.longest_document={most} with {other_policies(length, most)}",
    )


def training_values(steps: PlannedSteps, args: Any) -> tuple[int, ...]:
    """Return what Trainer counts before training: epochs, steps of the first epoch, documents of one and of all, documents of a
    step, steps of the first epoch once more, and steps in all. Epochs need not have the same number of steps."""
    documents = len(steps)
    whole, part = int(args.num_train_epochs), args.num_train_epochs % 1
    if args.max_steps > 0:
        max_steps, epochs, left = args.max_steps, 0, args.max_steps
        while left > 0:
            left -= steps.steps(epochs)
            epochs += 1
    else:
        max_steps = sum(steps.steps(epoch) for epoch in range(whole)) + math.ceil(part * steps.steps(whole))
        epochs = whole + (part > 0)
    first = steps.steps(0)
    return epochs, first, documents, documents * max_steps // first, round(documents / first), first, max_steps


def position_of(steps: PlannedSteps, done: int) -> tuple[int, int]:
    """Return the epoch, and the steps of it, that so many optimizer steps have come to."""
    epoch = 0
    while done >= (in_epoch := steps.steps(epoch)):
        epoch, done = epoch + 1, done - in_epoch
    return epoch, done
