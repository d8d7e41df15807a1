"""The rows of the steps of a training: looked up, and shown."""
