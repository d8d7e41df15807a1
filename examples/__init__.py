"""Examples: each file is a script and a module whose classes the configs name."""
