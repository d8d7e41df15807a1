"""``python -m lightning_memmap``: the same as the command ``lightning-memmap``."""

from lightning_memmap.cli import main

if __name__ == "__main__":
    main()
