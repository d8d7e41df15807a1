"""Does a store ever hold a wrong row? A program that kills, damages and deceives, and counts.

    python -m tests.programs.reliability --quick
    python -m tests.programs.reliability --write docs/reliability.md

See docs/reliability.md for what it does and what it found.
"""
