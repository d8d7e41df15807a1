"""A page that shows what is in stores: samples, distributions, bytes by field and shard."""

from lightning_memmap.commands.store_page.page import render_stores

__all__ = ["render_stores"]
