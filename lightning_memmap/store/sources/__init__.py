"""Sources: datasets whose rows are read many at once, and datasets of our own."""
