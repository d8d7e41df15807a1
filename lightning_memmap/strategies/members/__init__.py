"""Independent members: how they are started, and how they ended."""
