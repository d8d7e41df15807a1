"""The commands of ``lightning-memmap`` that need no training, and what they show."""
