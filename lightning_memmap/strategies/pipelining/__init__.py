"""The processes, stages, schedules and micro-batches of a pipeline."""
