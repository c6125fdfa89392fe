"""Running a planned step through the stages of a pipeline."""
