"""The replicas of ``memmap_dp`` in one process."""
