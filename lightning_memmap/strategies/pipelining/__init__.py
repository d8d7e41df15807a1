"""The parts of a pipeline: processes, stages, schedules, micro-batches."""
