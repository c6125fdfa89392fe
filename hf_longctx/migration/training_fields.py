"""Fields of transformers.TrainingArguments, which LLaMA-Factory and TRL take as they are, and so does the section `training`."""

from hf_longctx.migration import shared
from hf_longctx.migration.rules import Needless, Rule, To, keys

ELSEWHERE = {
    "optim": shared.optimizer,
    **keys(
        Needless("planned, not padded: documents of a step are longctx.global_batch_documents"),
        "train_sampling_strategy length_column_name",
    ),
    **keys(
        Needless("found by the launcher"),
        "local_rank accelerator_config parallelism_config do_train do_eval do_predict",
    ),
    **keys(shared.LIGER, "use_liger_kernel liger_kernel_config"),
    **keys(Needless("rows keep what is read of them"), "remove_unused_columns dataloader_drop_last"),
}
"""Fields that are set otherwise here, or not needed."""


def same_fields() -> dict[str, Rule]:
    """Return the rule of each field of TrainingArguments."""
    from hf_longctx.settings.training import field_types

    return {name: To(f"training.{name}") for name in field_types()} | ELSEWHERE
