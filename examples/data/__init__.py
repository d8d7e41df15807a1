"""The data of the examples: datasets that read, download or make their files."""
