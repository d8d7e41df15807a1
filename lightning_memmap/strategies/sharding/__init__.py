"""How ``memmap_fsdp2`` shards a module and its state."""
