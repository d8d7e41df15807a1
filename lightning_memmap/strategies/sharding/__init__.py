"""Sharding a module with FSDP2: its units, their precision, and checkpoints of shards."""
