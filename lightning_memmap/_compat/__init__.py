"""Logic that leans on private names of torch, Lightning and argparse."""
