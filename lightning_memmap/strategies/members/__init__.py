"""The processes of ``memmap_independent``, and their results."""
