"""What a strategy has from its set-up on, before there was one and after it is gone."""

from pathlib import Path
from typing import Any

import pytest

from tests.models import Regression
from tests.strategies.contract import CONTRACTS, make_run

WITH_RUN = [
    "memmap_dp",
    "memmap_model_parallel",
    "memmap_fsdp2",
    "memmap_pipeline",
]


@pytest.mark.parametrize("name", WITH_RUN)
@pytest.mark.parametrize("attribute", ["run", "module"])
def test_strategy_without_a_trainer_is_not_set_up(name: str, attribute: str) -> None:
    strategy = CONTRACTS[name].make_class()()
    message = rf"strategy='{name}' is not set up: call fit, validate, test or predict"
    with pytest.raises(RuntimeError, match=message):
        getattr(strategy, attribute)


@pytest.mark.parametrize("name", ["memmap_dp", "memmap_model_parallel"])
def test_strategy_after_teardown_is_not_set_up_until_the_next_stage(
    tmp_path: Path, name: str
) -> None:
    trainer, data = make_run(name, tmp_path)
    strategy: Any = trainer.strategy
    for _ in range(2):
        trainer.validate(Regression(), datamodule=data, verbose=False)
        strategy.teardown()  # Once more than the Trainer.
        with pytest.raises(RuntimeError, match="is not set up"):
            _ = strategy.run
