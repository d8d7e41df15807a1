"""Private names of Lightning's seeds: the random state of the whole process."""

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from torch.utils._pytree import tree_leaves

#: What ``seed_everything`` sets beside the state of the generators.
_VARIABLES = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")


@dataclass(frozen=True)
class RandomState:
    """The state of the generators of Python, numpy, torch and all GPUs, and the user's seed.

    Args:
        generators: Their states, by name.
        variables: The environment variables that `L.seed_everything` sets.
    """

    generators: dict[str, Any]
    variables: dict[str, str | None]

    @classmethod
    def now(cls) -> "RandomState":
        """The present state.

        Returns:
            A copy, which later random numbers do not change.
        """
        return cls(_collect_rng_states(), {name: os.environ.get(name) for name in _VARIABLES})

    def restore(self) -> None:
        """Continue from this state."""
        _set_rng_states(self.generators)
        for name, value in self.variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def equals(self, other: "RandomState") -> bool:
        """Whether both lead to the same random numbers.

        Args:
            other: The state to compare with.

        Returns:
            True if all generators and the user's seed are equal.
        """
        states = tree_leaves(self.generators), tree_leaves(other.generators)
        return (
            self.variables == other.variables
            and len(states[0]) == len(states[1])
            and all(np.array_equal(one, two) for one, two in zip(*states, strict=True))
        )
