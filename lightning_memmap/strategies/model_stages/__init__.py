"""The stages of ``memmap_model_parallel``: how layers are cut into them."""
