"""Reads the options of a data module from the loaders of an existing one.

loader_facts     the facts that DataLoaders state: datasets, batch sizes, rows and orders
loader_source    the existing data module, and the options that its loaders stand for

Everything that a ``DataLoader`` states becomes an option, or raises an error that names it. Options
that were set to something other than their default are not read.
"""
