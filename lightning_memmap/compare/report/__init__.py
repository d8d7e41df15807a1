"""What a comparison found: records of its processes, figures, parity, regression, the report."""
