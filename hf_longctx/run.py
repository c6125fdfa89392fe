"""From a configuration to a trained model: what `scripts/train.py` does on each rank.

1. Load model, tokenizer and documents. 2. Say what the first steps' plans do. 3. Evaluate, train, evaluate. 4. Rank 0
leaves the model, results.json, pictures of the first plans and of the loss, report.html, and the model card.

The model is saved as a plain transformers checkpoint, adapters as a plain PEFT one. Nothing here is needed to use
LongContextTrainer from Python.
"""

import os
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback, TrainingArguments
from transformers.distributed import DistributedConfig
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils import logging

from hf_longctx.checkpoint.choice import resumed
from hf_longctx.data.tokenisation import VERSION
from hf_longctx.models.adapters.new_rows import add_rows
from hf_longctx.models.adapters.peft_adapters import add_lora, four_bit_weights, freeze
from hf_longctx.models.rope_scaling import scale_rope
from hf_longctx.models.stages import adopt_stages, loaded_stages, loading_stages
from hf_longctx.models.wrappers import language_model_of
from hf_longctx.parallel.reduction import meet
from hf_longctx.precision import AUTO, Decision, with_precision
from hf_longctx.report.training_runs.live_view import doing, preparing, show_live
from hf_longctx.run_documents import load_split, model_directory, tokenizer_of
from hf_longctx.settings import EMBEDDED_DATA, EMBEDDED_MODEL, Config
from hf_longctx.settings.gpu_environment import hide_gpus, set_for_gpus
from hf_longctx.settings.longctx import LongContextPlugin
from hf_longctx.settings.model_overrides import overridden
from hf_longctx.supervision.progress import Progress
from hf_longctx.supervision.watchdog import Watchdog
from hf_longctx.training.autocast import settle_precision
from hf_longctx.training.muon import training_arguments
from hf_longctx.training.run_start import (
    BEFORE,
    FINISHED,
    FirstResults,
    announce,
    data_summary,
    last_step,
    next_plan,
    say_done,
    start_of,
    training_summary,
    write_results,
)
from hf_longctx.training.run_state import data_version_of
from hf_longctx.training.trainer import LongContextTrainer
from hf_longctx.training.waiting import first_of_machine_first, wait_for_all

logger = logging.get_logger(__name__)

EMBEDDED_ORIGIN, EMBEDDED_LICENCE = "HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0"
"""Whose weights the embedded model has."""
UNDECIDED = Decision(False, "not decided yet")
"""Decision that arguments with `bf16: auto` begin with: all that they do with it, `settle_precision` sets again."""
PICTURED_STEPS = 4
"""Optimizer steps in the picture of the plan."""


def run(config: Config) -> LongContextTrainer:
    """Trains as configured, on as many ranks as the launcher started; returns the trainer.

    Raises:
        ValueError: settings or documents that cannot be honoured, before training begins.
    """
    if config.training.get("use_cpu"):
        hide_gpus(os.environ)
    elif torch.cuda.device_count():
        added = set_for_gpus(os.environ)
        logger.info(f"set for GPUs: {', '.join(f'{name}={value}' for name, value in added.items()) or 'nothing'}")
    plugin = LongContextPlugin(**config.longctx.given())
    progress = Progress()
    watching = Watchdog(progress, plugin.stall_timeout_seconds)
    speaks = os.environ.get("RANK", "0") == "0" and not config.training.get("disable_tqdm")
    console = Console(stderr=True, highlight=False, soft_wrap=True) if speaks else None
    with watching.explaining(), doing("setting up", console, lambda: progress.activity):
        watching.progress.begin("joining the other ranks", unbounded=True)
        watching.start()  # here already, where a launcher has a store for it
        training, _ = with_precision(config.training, lambda: UNDECIDED)  # until the model is known
        arguments = training_arguments(training)  # makes the process group
        watching.start()
        trainer = _trainer(config, arguments, plugin, watching)
    show_live(trainer, console)
    chosen = config.model
    if chosen.lora and (chosen.rope_scaling or chosen.config or chosen.added_tokens or chosen.eos_token):
        trainer.add_callback(TrainedConfig())
    with trainer.checkpoints.alone_in_output_dir(trainer.args.resume_from_checkpoint, writes=True):
        _train(trainer, console, watching)
    return trainer


def _train(trainer: LongContextTrainer, console: Console | None, watching: Watchdog) -> None:
    """Train and leave all results, where there is anything left to do."""
    trainer.progress.begin("planning the first steps", unbounded=True)
    with doing("planning the first steps", console):
        start = start_of(trainer)
        last = last_step(trainer)  # on all ranks: with loader="ray" they agree on where steps are planned
        plan = next_plan(trainer, start, last) if trainer.is_world_process_zero() else ""
    if start.is_done(last):
        if trainer.is_world_process_zero():
            say_done(trainer, start, last)
        watching.stop()
        meet(trainer.args.device)
        return
    if trainer.eval_dataset is not None:  # what cannot be evaluated afterwards is refused before any step
        trainer.get_eval_dataloader()
    output = trainer.args.output_dir
    results: dict[str, Any] = data_summary(trainer) | start.kept_results
    if trainer.is_world_process_zero():
        announce(trainer, start, last, plan)
    if trainer.eval_dataset is not None and start.anew:
        trainer.progress.begin("evaluating before training", unbounded=True)
        with doing("evaluating before training", console):
            results[BEFORE] = trainer.evaluate()["eval_loss"]
    trainer.add_callback(FirstResults(results))
    with preparing(trainer, console, lambda: trainer.progress.activity):
        trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    results |= training_summary(trainer)
    if trainer.run_state.skipped_steps:
        results["skipped_steps"] = trainer.run_state.skipped_steps
    if trainer.eval_dataset is not None:
        if trainer.args.save_strategy == "no":  # whatever becomes of the evaluation, what was trained is there
            with doing("saving the model", console):
                trainer.save_model(_internal_call=True)
        with doing("evaluating after training", console):
            results["eval_loss_after"] = trainer.evaluate()["eval_loss"]
    trainer.save_state()
    if trainer.is_world_process_zero():
        write_results(output, results)
    with doing("saving the model", console):
        trainer.save_model()  # pushes it and its card too, where that is wanted
    if trainer.is_world_process_zero():
        with doing("drawing pictures", console):
            problem = _draw(trainer, results)
        _say_results(results, problem)
    with doing("writing the report", console):
        trainer.create_model_card()
    if trainer.is_world_process_zero():
        write_results(output, results | {FINISHED: trainer.state.global_step})
    meet(trainer.args.device)  # ranks leave together, however long rank 0 takes to save


def _trainer(config: Config, arguments: TrainingArguments, plugin: LongContextPlugin, watching: Watchdog) -> Any:
    """Make the trainer of the model and the documents, which may take any time to load."""
    progress = watching.progress
    settings: dict[str, Any] = {"dtype": getattr(torch, config.model.dtype)}
    if config.model.load_in_4bit:
        settings |= {
            "quantization_config": four_bit_weights(settings["dtype"]),
            "device_map": {"": arguments.device},
        }
    progress.begin("loading the tokenizer", unbounded=True)
    with first_of_machine_first("preparing the model", arguments.local_process_index):
        model_path = model_directory(config.model.path)
        tokenizer = tokenizer_of(config.model)
    progress.begin("preparing documents", unbounded=True)
    train_dataset, eval_dataset = _datasets(config, tokenizer, arguments)
    progress.begin("loading the model", unbounded=True)
    torch.manual_seed(arguments.seed)
    model = _model(config, model_path, settings, tokenizer)
    progress.begin("choosing bfloat16 or float32")
    precision = settle_precision(arguments, model) if config.training.get("bf16") == AUTO else None
    return ReportingTrainer(
        configuration=config,
        model=model,
        args=arguments,
        precision=precision,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        plugin=plugin,
        watching=watching,
        uncertified=config.model.uncertified,
    )


def _datasets(config: Config, tokenizer: Any, arguments: TrainingArguments) -> tuple[Any, Any]:
    """Training and evaluation documents; evaluation's may be None. Collective: the first process of each machine prepares them,
    and tells the others where they are."""
    data, version = config.data, data_version(config, arguments)
    splits = [split for split in (data.train_split, data.held_out) if split is not None]
    datasets: dict[str, Any] = {}
    report: dict[str, Any] = {"prepared": {}, "problem": None}
    problem: Exception | None = None
    try:
        if arguments.local_process_index == 0:
            for split in splits:
                datasets[split] = load_split(
                    data, split, tokenizer, ray_address=config.longctx.ray_address, version=version
                )
                report["prepared"][split] = getattr(datasets[split], "directory", None)
    except Exception as error:  # the others must not wait for ever
        problem, report["problem"] = error, str(error)
    first = arguments.process_index - arguments.local_process_index
    wait_for_all("preparing documents")
    report = gather_object([report])[first]
    if problem is not None:
        raise problem
    if report["problem"] is not None:
        raise ValueError(report["problem"])
    if not datasets:
        for split in splits:
            datasets[split] = load_split(data, split, tokenizer, prepared=report["prepared"][split], version=version)
    return datasets[data.train_split], datasets.get(data.held_out or "")


def data_version(config: Config, arguments: TrainingArguments) -> int:
    """Return the version of documents: VERSION, or that of the run that is resumed, of which a warning tells.

    Raises:
        ValueError: end tokens are asked for, and the run that is resumed has none.
    """
    folder = resumed(arguments.resume_from_checkpoint, Path(arguments.output_dir or "."))
    version = None if folder is None else data_version_of(folder)
    read = [source for source in config.data.all_sources if source.kind != "tokens"]
    if version != 1 or not read:
        return version or VERSION
    notice = f"resuming from {folder}, which was made before texts got an end token"
    if any(source.add_eos for source in read if source.kind in ("auto", "text")):
        raise ValueError(
            f"data.add_eos=true, {notice}: its documents have none. Valid: data.add_eos false or null, or a new run"
        )
    if arguments.process_index == 0:
        logger.warning(
            f"{notice}: texts get none in this run either (data.add_eos), and what a chat template leaves out of a row is not "
            "refused, as it was not then. A new run does both"
        )
    return version


class ReportingTrainer(LongContextTrainer):
    """Leaves our page and model card where Trainer leaves its card."""

    def __init__(self, *args: Any, configuration: Config, **kwargs: Any) -> None:
        self._configuration = configuration
        super().__init__(*args, **kwargs)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write the record, the page and the model card on rank 0. Failures are printed, not raised: the run itself succeeded."""
        if not self.is_world_process_zero():
            return
        from hf_longctx.report.training_runs.model_card import write_model_card
        from hf_longctx.report.training_runs.run_page import write_run_page
        from hf_longctx.report.training_runs.run_record import write_record

        config, output = self._configuration, self.args.output_dir
        embedded = config.model.path == EMBEDDED_MODEL
        named = [source.path for source in config.data.all_sources if isinstance(source.path, str)]
        record = partial(
            write_record,
            self,
            configuration=config.model_dump(mode="json", exclude_unset=True),
            base_model=EMBEDDED_ORIGIN if embedded else config.model.path,
            licence=EMBEDDED_LICENCE if embedded else None,
            sources=named,
            datasets=[path for path in named if path != EMBEDDED_DATA and not Path(path).exists()],
        )
        for what, write in (
            ("record", record),
            ("page", partial(write_run_page, output)),
            ("model card", partial(write_model_card, output)),
        ):
            try:
                write()
            except Exception as error:
                Console(stderr=True).print(f"no {what} of the run: {type(error).__name__}: {error}", markup=False)


class TrainedConfig(TrainerCallback):
    """Leaves config.json and generation_config.json beside the saved adapters: the positions, tokens and keys of `model.config`
    they were trained with, and what ends texts, are not those of the weights they stand on, and PEFT saves none of it.
    Checkpoints hold both files."""

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            model = language_model_of(kwargs["model"])
            for configuration in filter(None, (model.config, model.generation_config)):
                configuration.save_pretrained(args.output_dir)


def _model(config: Config, model_path: str | None, settings: dict[str, Any], tokenizer: Any) -> Any:
    """Load the model that is trained: scaled before it is made, given rows for new tokens, then frozen in part or given adapters.
    The trainer patches it."""
    chosen = config.model
    if model_path is None:
        assert chosen.random_init is not None
        model_config = AutoConfig.for_model(**chosen.random_init)
    else:
        model_config = AutoConfig.from_pretrained(model_path, trust_remote_code=chosen.trust_remote_code)
        model_config = overridden(
            model_config, chosen.config or {}, path=model_path, trust_remote_code=chosen.trust_remote_code
        )
        _dequantise(model_config)
    if chosen.rope_scaling is not None:
        scale_rope(model_config, **chosen.rope_scaling.model_dump())
    settings = settings | {"trust_remote_code": chosen.trust_remote_code}
    model: Any
    if model_path is None:
        model = AutoModelForCausalLM.from_config(model_config, **settings)
    else:
        with loading_stages() as can_load_stages:
            if can_load_stages and _reads_own_stage(config):
                settings |= {"distributed_config": DistributedConfig(pp_size=config.longctx.pipeline_stages)}
            model = AutoModelForCausalLM.from_pretrained(
                model_path, config=model_config, use_safetensors=True, **settings
            )
    if settings["dtype"] == torch.float32 and not chosen.load_in_4bit:
        model.float()  # transformers before 5.23 expands what was published in four bits as bfloat16
    if loaded_stages(model) > 1:
        adopt_stages(model)
    if chosen.added_tokens:
        if loaded_stages(model) > 1:
            raise ValueError(
                "model.added_tokens with stages that read their own weights: add them before, on one process"
            )
        add_rows(model, len(tokenizer))
    if chosen.eos_token is not None:
        for configuration in (model.config.get_text_config(), model.generation_config):
            configuration.eos_token_id = tokenizer.eos_token_id
    if chosen.freeze is not None:
        freeze(model, chosen.freeze)
    return model if chosen.lora is None else add_lora(model, **chosen.lora.model_dump())


def _dequantise(config: Any) -> None:
    """Have transformers expand the weights of a checkpoint that was published in few bits (gpt-oss in MXFP4, DeepSeek V3 in FP8)
    as it loads them, where it can: packed ones have no gradients. Without this it depends on installed packages."""
    packing: dict[str, Any] = getattr(config, "quantization_config", None) or {}
    kind = AUTO_QUANTIZATION_CONFIG_MAPPING.get(packing.get("quant_method", ""))
    if kind is not None and "dequantize" in signature(kind).parameters:
        packing["dequantize"] = True


def _reads_own_stage(config: Config) -> bool:
    """Return whether each process reads the weights of its pipeline stage alone; else all, of which it keeps its stages'.
    Adapters are drawn for the whole model, so that they begin alike in any number of stages."""
    longctx, model = config.longctx, config.model
    if longctx.pipeline_stages == 1 or longctx.virtual_stages > 1:
        return False
    return longctx.sharding in ("auto", "ddp", "zero1") and model.lora is None and not model.load_in_4bit


def _draw(trainer: LongContextTrainer, results: dict[str, Any]) -> str:
    """Write the pictures into the output directory. Returns why there are none; "": there are."""
    from hf_longctx.report.pictures.canvas import PictureError
    from hf_longctx.report.pictures.loss_picture import draw_loss
    from hf_longctx.report.plans.plan_picture import draw_plans

    output = Path(trainer.args.output_dir)
    steps = trainer.training_steps()
    # Training begins with an empty history, so the evaluation before it is not in there.
    before = [{"step": 0, "eval_loss": results[BEFORE]}] if BEFORE in results else []
    try:
        draw_plans([steps.plan(0, step) for step in range(min(PICTURED_STEPS, steps.steps(0)))], output / "plan.png")
        draw_loss(before + trainer.state.log_history, output / "loss.png")
    except PictureError as error:
        return f"no pictures: {error}"
    return ""


def _say_results(results: dict[str, Any], problem: str) -> None:
    """Print what came out, and why there are no pictures of it."""
    if problem:
        Console(stderr=True).print(problem, markup=False)
    console = Console(highlight=False, soft_wrap=True, markup=False)
    for name, value in results.items():
        console.print(f"{name:18} {value:.4f}" if isinstance(value, float) else f"{name:18} {value}")
