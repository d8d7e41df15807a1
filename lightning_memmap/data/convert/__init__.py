"""Reads the options of a data module from the loaders of an existing one.

loader_facts     the facts that one DataLoader states: its dataset, batch size, rows and order
loader_tree      the loaders that one method returns, in their list, dict or CombinedLoader
loader_source    the existing data module, and the options that its loaders stand for
training_sets    the data modules of several training loaders

Everything that a ``DataLoader`` states becomes an option, or raises an error that names it. Options
that were set to something other than their default are not read.
"""
