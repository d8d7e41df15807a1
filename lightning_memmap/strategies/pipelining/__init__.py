"""The stages and schedules of ``memmap_pipeline``."""
