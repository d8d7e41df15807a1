"""Steps that run in several parts, by replicas or micro-batches, and are one step to Lightning."""
