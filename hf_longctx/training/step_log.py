"""Values that a trainer logs of an optimizer step, beside Trainer's loss, norm and learning rate."""

from typing import Any

from hf_longctx.data.collator import RankStep


def describe_step(trainer: Any, step: RankStep, sent: float) -> dict[str, float]:
    """Return what is logged of a step.

    Args:
        sent: bytes, by all ranks.
    """
    summary = step.plan.summary()
    return {
        "documents": summary.documents,
        "split_documents": summary.split_documents,
        "tokens": step.num_tokens,
        "plan_balance": round(summary.balance, 4),
        "plan_idle": round(summary.idle_share, 4),
        "exchanged_mib": round(sent / 2**20, 3),
        "recalibrations": trainer.run_state.recalibrations,
        "skipped_steps": trainer.run_state.skipped_steps,
        "data_wait_seconds": float(f"{trainer.data_wait_seconds:.3g}"),
        "save_seconds": round(trainer.checkpoints.save_seconds, 3),
        "failed_saves": trainer.checkpoints.writer.failures,
        **({"offloaded_tokens": summary.offloaded_tokens} if trainer.plugin.plan_offload else {}),
        **trainer.steps.describe(),
        **trainer.recalibration.describe(summary.makespan),
    } | trainer.measurements.log()
