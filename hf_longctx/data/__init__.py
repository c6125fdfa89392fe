"""Documents -> micro-batches: length index, collator, planner-driven loader, and the embedded default."""
