"""Independent members that run sequentially in one process: each as if it ran alone."""

import bdb
import gc
import os
import re
import signal
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.utils.data import DataLoader

from lightning_memmap import MemmapDataModule, open_store
from lightning_memmap.callbacks import PredictionTable
from lightning_memmap.errors import MemberError, UnsuitableModuleError
from lightning_memmap.strategies import IndependentStrategy, MemberResults, read_results
from lightning_memmap.strategies.independent import MEMBER_VARIABLE
from tests.datasets import in_dataset_order
from tests.models import Points, Regression, make_trainer, weights
from tests.strategies.contract import CASES
from tests.strategies.members import make_data

MEMBERS = 2


@pytest.fixture(scope="module", autouse=True)
def leave_no_copies() -> Iterator[None]:
    """Tests of other modules look at all parameters that are alive."""
    yield
    let_copies_go()


def let_copies_go() -> None:
    # What only a copy holds is found once the copy is gone.
    for _ in range(3):
        gc.collect()


def sequential(members: int = MEMBERS, **options: Any) -> IndependentStrategy:
    return IndependentStrategy(num_members=members, processes=False, **options)


def module_of(strategy: IndependentStrategy, member: int) -> Any:
    return strategy.trainers[member].lightning_module


def statuses(results: MemberResults | None) -> list[str]:
    assert results is not None
    return [result.status for result in results.members]


class Chosen(Regression):
    """Reports which member it is."""

    @property
    def member(self) -> int:
        member: int = self.trainer.strategy.member  # type: ignore[attr-defined]
        return member


# As a lone run


@pytest.mark.parametrize("case", CASES)
def test_members_are_as_lone_runs_bit_for_bit(tmp_path: Path, case: str) -> None:
    def fit(name: str, member: int | None = None, **options: Any) -> tuple[Any, L.Trainer]:
        torch.manual_seed(1)
        out = tmp_path / name
        options |= {**CASES[case].options, "callbacks": [*CASES[case].callbacks(out)]}
        with warnings.catch_warnings():
            # Some cases do something that Lightning warns of; here they are to be the same.
            warnings.simplefilter("ignore")
            trainer = make_trainer(out, **options)
            module = CASES[case].make()
            trainer.fit(module, make_data(tmp_path, member=member))
        return module, trainer

    strategy = sequential()
    module, trainer = fit("sequential", strategy=strategy)
    assert strategy.trainers[0] is trainer
    assert module_of(strategy, 0) is module
    for member in range(MEMBERS):
        expected, reference = fit(f"alone_{member}", member)
        found, trainer = module_of(strategy, member), strategy.trainers[member]
        assert trainer.global_step == reference.global_step > 0
        assert trainer.current_epoch == reference.current_epoch
        assert found.seen == expected.seen
        assert found.dtypes == expected.dtypes
        assert torch.equal(weights(found), weights(expected))
        assert not torch.equal(weights(found).float(), weights(CASES[case].make()))
    assert not torch.equal(weights(module_of(strategy, 1)), weights(module))


def test_members_stop_save_log_and_schedule_by_themselves(tmp_path: Path) -> None:
    class Own(Chosen):
        def configure_model(self) -> None:
            if not hasattr(self, "wider"):
                self.wider = nn.Linear(8, 1 + self.member)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1 / (1 + self.member))
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            # Gets better for as many epochs.
            self.log("mine", float(max(0, self.member - self.current_epoch)))

    strategy = sequential(3)
    trainer = make_trainer(
        tmp_path,
        strategy=strategy,
        max_epochs=6,
        enable_checkpointing=True,
        logger=CSVLogger(tmp_path / "logs"),
        log_every_n_steps=1,
        callbacks=[
            ModelCheckpoint(tmp_path / "saved", monitor="mine", filename="{epoch}"),
            EarlyStopping("mine", patience=1),
        ],
    )
    trainer.fit(Own(), make_data(tmp_path, num_folds=3))
    results = strategy.results
    assert results is not None
    assert [result.epochs for result in results.members] == [2, 3, 4]
    for member, result in enumerate(results.members):
        folder = f"member_{member}"
        assert result.checkpoint == str(tmp_path / "saved" / folder / f"epoch={member}.ckpt")
        saved = torch.load(result.checkpoint, weights_only=True)
        assert len(saved["state_dict"]["wider.bias"]) == 1 + member
        rate = saved["optimizer_states"][0]["param_groups"][0]["lr"]
        assert rate == pytest.approx(0.1 / (1 + member) * 0.5 ** (member + 1))
        log = tmp_path / "logs" / folder / "lightning_logs/version_0/metrics.csv"
        assert len(log.read_text().splitlines()) > result.steps
        assert strategy.trainers[member].strategy.member_dir == tmp_path / folder  # type: ignore[attr-defined]
    assert read_results(tmp_path) == results


def test_stages_after_fit_go_on_with_each_members_own(tmp_path: Path) -> None:
    strategy = sequential()
    trainer = make_trainer(tmp_path, strategy=strategy, enable_checkpointing=True, max_epochs=2)
    module, data = Regression(), make_data(tmp_path)
    trainer.fit(module, data)
    (validated,) = trainer.validate(module, data, verbose=False)
    trainer.test(datamodule=data, ckpt_path="best", weights_only=True, verbose=False)
    assert statuses(strategy.results) == ["done"] * MEMBERS
    predictions = trainer.predict(module, data)
    assert predictions is not None
    assert sum(len(batch["row"]) for batch in predictions) == 25
    for member in range(MEMBERS):
        lone = Regression()
        saved = read_results(tmp_path).members[member].checkpoint
        assert saved is not None
        lone.load_state_dict(torch.load(saved, weights_only=True)["state_dict"])
        alone = make_trainer(tmp_path / "alone")
        (expected,) = alone.test(lone, make_data(tmp_path), verbose=False)
        assert read_results(tmp_path, "test").members[member].metrics == expected
        # The expected rows: the held-out fold, then all test rows.
        seen = module_of(strategy, member).seen
        assert [row for step in seen["test"] for row in step] == list(range(100, 120))
        held_out = [row for step in seen["val"][-7:] for row in step]
        assert held_out == list(range(member, 63, MEMBERS))
    assert read_results(tmp_path, "validate").members[0].metrics == validated
    # Nothing was put below a folder twice.
    folders = [path.name for path in tmp_path.rglob("member_*")]
    assert sorted(folders) == ["member_0", "member_1"]


def test_callbacks_that_a_module_brings_are_each_members_own(tmp_path: Path) -> None:
    class Bringing(Chosen):
        def configure_callbacks(self) -> Any:
            last = ModelCheckpoint(tmp_path / "mine", filename="own", monitor="val_loss")
            # Not of the same types: those would replace each other.
            return [last, *([EarlyStopping("val_loss")] if self.member else [])]

    strategy = sequential()
    trainer = make_trainer(tmp_path, strategy=strategy, enable_checkpointing=True)
    module, data = Bringing(), make_data(tmp_path)
    trainer.fit(module, data)
    trainer.test(module, data, ckpt_path="best", weights_only=True, verbose=False)
    assert statuses(strategy.results) == ["done"] * MEMBERS
    assert [len(t.callbacks) for t in strategy.trainers.values()] == [1, 2]  # type: ignore[attr-defined]
    saved = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("own*.ckpt"))
    assert saved == ["mine/member_0/own.ckpt", "mine/member_1/own.ckpt"]


def test_another_trainer_goes_on_with_each_members_own(tmp_path: Path) -> None:
    module, data = Regression(), make_data(tmp_path)
    first = sequential()
    make_trainer(tmp_path, strategy=first).fit(module, data)
    before = [weights(module_of(first, member)) for member in range(MEMBERS)]
    modules = [module_of(first, member) for member in range(MEMBERS)]
    second = sequential()
    make_trainer(tmp_path / "again", strategy=second).validate(module, data, verbose=False)
    for member in range(MEMBERS):
        assert module_of(second, member) is modules[member]
        assert torch.equal(weights(module_of(second, member)), before[member])

    # A new module around a submodule of the old one.
    class Around(Regression):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = nn.Sequential(net)

    around, third = Around(module.net), sequential()
    make_trainer(tmp_path / "third", strategy=third).validate(around, data, verbose=False)
    for member in range(MEMBERS):
        assert torch.equal(weights(module_of(third, member)), before[member])
    assert not torch.equal(before[0], before[1])


def test_resume_is_as_the_whole_run_for_each_member(tmp_path: Path) -> None:
    def fit(name: str, max_epochs: int, **options: Any) -> IndependentStrategy:
        strategy = sequential()
        trainer = make_trainer(
            tmp_path / name,
            strategy=strategy,
            max_epochs=max_epochs,
            enable_checkpointing=True,
            callbacks=[ModelCheckpoint(tmp_path / name, save_last=True)],
        )
        with warnings.catch_warnings():
            # The checkpoints that are resumed are in another directory.
            warnings.filterwarnings("ignore", message="The dirpath has changed")
            trainer.fit(Regression(), make_data(tmp_path), weights_only=True, **options)
        return strategy

    whole = fit("whole", 3)
    fit("first", 1)
    resumed = fit("rest", 3, ckpt_path=tmp_path / "first" / "member_{member}" / "last.ckpt")
    for member in range(MEMBERS):
        found, expected = module_of(resumed, member), module_of(whole, member)
        assert torch.equal(weights(found), weights(expected))
        steps = len(found.seen["train"])
        assert found.seen["train"] == expected.seen["train"][-steps:]
        assert len(expected.seen["train"]) == steps // 2 * 3


def test_parts_stores_and_loaders_are_each_members_own(tmp_path: Path) -> None:
    for site in range(MEMBERS):
        stored = make_data(
            tmp_path, train_dataset=Points(20, 1000 * site), num_folds=None,
            store_dir=tmp_path / f"site_{site}",
        )  # fmt: skip
        stored.prepare_data()

    def rows(data: Any, val: Any = None, **options: Any) -> list[list[int]]:
        strategy = sequential()
        torch.manual_seed(4)
        make_trainer(tmp_path, strategy=strategy, **options).fit(Regression(), data, val)
        return [
            [row for step in module_of(strategy, member).seen["train"] for row in step]
            for member in range(MEMBERS)
        ]

    subsets = rows(make_data(tmp_path, num_folds=None, num_parts=MEMBERS))
    assert [sorted(subset) for subset in subsets] == [list(range(0, 63, 2)), list(range(1, 63, 2))]
    sites = rows(
        make_data(
            tmp_path, train_dataset=None, num_folds=None, store_dir=tmp_path / "site_{member}"
        )
    )
    assert [sorted(site) for site in sites] == [list(range(20)), list(range(1000, 1020))]
    # Loaders of torch, shuffled by the random numbers of the process: as for a lone run.
    loader = DataLoader(Points(20), batch_size=5, shuffle=True)
    shuffled = rows(loader, DataLoader(Points(9, 50), batch_size=5), max_epochs=2)
    assert shuffled[0] == shuffled[1]
    assert sorted(shuffled[0]) == sorted([*range(20)] * 2)


def test_predictions_of_each_member_are_a_table(tmp_path: Path) -> None:
    strategy = sequential()
    trainer = make_trainer(tmp_path, strategy=strategy)
    module, data = Regression(), make_data(tmp_path)
    trainer.fit(module, data)
    table = PredictionTable(tmp_path / "table_{member}")
    second = sequential()
    predicting = make_trainer(tmp_path, strategy=second, callbacks=[table])
    predicting.predict(module, data, return_predictions=False)
    x = Points(25, 200).x
    for member in range(MEMBERS):
        found = in_dataset_order(open_store(tmp_path / f"table_{member}"))
        assert found["row"].tolist() == list(range(200, 225))
        expected = module_of(strategy, member)(x).detach()
        torch.testing.assert_close(found["y"], expected)
    assert not torch.equal(module(x), module_of(strategy, 1)(x))
    alone = make_trainer(tmp_path, callbacks=[PredictionTable(tmp_path / "table_{member}")])
    with pytest.raises(ValueError, match=r"\{member\} in the path"):
        alone.predict(module, data, return_predictions=False)


def test_tuner_finds_a_rate_for_each_member(tmp_path: Path) -> None:
    class Wider(Chosen):
        def configure_model(self) -> None:
            with torch.no_grad():
                self.net[0].weight *= 1 + 10 * self.member

    strategy = sequential()
    module = Wider()
    trainer = make_trainer(tmp_path, strategy=strategy, enable_checkpointing=True, max_epochs=20)
    Tuner(trainer).lr_find(module, datamodule=make_data(tmp_path), num_training=40)
    assert statuses(strategy.results) == ["done"] * MEMBERS
    rates = [module_of(strategy, member).lr for member in range(MEMBERS)]
    assert rates[0] == module.lr != 0.05
    assert rates[1] not in (rates[0], 0.05)


def test_compiled_modules_are_compiled_for_each_member(tmp_path: Path) -> None:
    class Quiet(Chosen):
        """Steps that compute and do nothing else, which is what a compiler is given."""

        def setup(self, stage: str) -> None:
            order.append(self.member)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return nn.functional.mse_loss(self.net(batch["x"]), batch["y"])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            nn.functional.mse_loss(self.net(batch["x"]), batch["y"])

    order: list[int] = []
    ran: set[int] = set()

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            ran.add(order[-1])
            return graph.forward(*args)

        return run

    def fit(wrap: Callable[[Any], Any]) -> IndependentStrategy:
        strategy = sequential()
        module, data = wrap(Quiet()), make_data(tmp_path)
        make_trainer(tmp_path, strategy=strategy, max_epochs=2).fit(module, data)
        again = sequential()
        make_trainer(tmp_path, strategy=again, max_epochs=1).fit(module, data)
        assert module_of(again, 1) is module_of(strategy, 1)
        torch._dynamo.reset()
        return again

    def wrap_part(module: Quiet) -> Quiet:
        module.net = torch.compile(module.net, backend=backend)  # type: ignore[assignment]
        return module

    class Net(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Any) -> Any:
            return self.inner(x)

    class InPlace(Quiet):
        def __init__(self) -> None:
            super().__init__()
            # No container of torch: their own code is not compiled.
            self.net: Any = Net(self.net)

        def configure_model(self) -> None:
            self.net.compile(backend=backend)

    plain = fit(lambda module: module)
    for wrap in (
        lambda module: torch.compile(module, backend=backend),
        wrap_part,
        lambda module: InPlace(),
    ):
        ran.clear()
        found = fit(wrap)
        assert ran == {0, 1}
        for member in range(MEMBERS):
            torch.testing.assert_close(
                weights(module_of(found, member)), weights(module_of(plain, member))
            )
    assert not torch.equal(weights(module_of(plain, 0)), weights(module_of(plain, 1)))


def test_members_share_the_devices_evenly(tmp_path: Path) -> None:
    strategy = sequential(3)
    strategy.parallel_devices = [torch.device("cpu"), torch.device("cpu", 0)]
    trainer = make_trainer(tmp_path, strategy=strategy)
    trainer.fit(Regression(), make_data(tmp_path, num_folds=3))
    assert strategy.results is not None
    assert [result.device for result in strategy.results.members] == ["cpu", "cpu:0", "cpu"]


def test_datasets_are_shared_and_copies_of_data_are_not_set_up(tmp_path: Path) -> None:
    class Seen(Chosen):
        def on_fit_start(self) -> None:
            data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
            found[self.member] = data

    found: dict[int, MemmapDataModule] = {}
    strategy = sequential()
    data = make_data(tmp_path, num_folds=None)
    data.prepare_data()
    data.setup()
    make_trainer(tmp_path, strategy=strategy).fit(Seen(), data)
    assert found[0] is data is not found[1]
    assert found[1].datasets["train"] is data.datasets["train"]
    assert found[1].stores["train"] is not data.stores["train"]


# Random numbers


def test_random_numbers_after_a_stage_are_as_after_a_lone_run(tmp_path: Path) -> None:
    class Noisy(Chosen):
        def on_train_epoch_end(self) -> None:
            torch.rand(1 + self.member)

    data = make_data(tmp_path, num_folds=None)
    torch.manual_seed(3)
    make_trainer(tmp_path / "a", strategy=sequential()).fit(Noisy(), data)
    after = torch.rand(4)
    torch.manual_seed(3)
    one = IndependentStrategy()
    make_trainer(tmp_path / "b", strategy=one).fit(Noisy(), data)
    assert torch.equal(after, torch.rand(4))


def test_seed_of_one_member_is_not_that_of_the_next(tmp_path: Path) -> None:
    class Seeding(Chosen):
        def configure_model(self) -> None:
            if self.member == 1:
                L.seed_everything(9, workers=True, verbose=False)

        def on_fit_start(self) -> None:
            found.append((os.environ.get("PL_GLOBAL_SEED"), torch.rand(()).item()))

    found: list[Any] = []
    make_trainer(tmp_path, strategy=sequential(3)).fit(Seeding(), make_data(tmp_path, num_folds=3))
    assert found[0] == found[2] != found[1]
    assert found[1][0] == "9"
    assert found[0][0] is None


# Failures


class Unlucky(Chosen):
    """One member fails in one hook."""

    def __init__(self, member: int, hook: str, error: BaseException | None = None) -> None:
        super().__init__()
        self.unlucky = member
        self.hook = hook
        self.error = error or ValueError("no luck")
        #: Of all members.
        self.alive: list[Any] = SHARED

    def fail(self, hook: str) -> None:
        if (self.member, hook) == (self.unlucky, self.hook):
            self.alive += [weakref.ref(self), weakref.ref(self.trainer)]
            raise self.error

    def setup(self, stage: str) -> None:
        self.fail("setup")

    def configure_model(self) -> None:
        self.fail("configure_model")

    def configure_optimizers(self) -> Any:
        self.fail("configure_optimizers")
        return super().configure_optimizers()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx:
            self.fail("training_step")
        return super().training_step(batch, batch_idx)

    def on_fit_end(self) -> None:
        self.fail("on_fit_end")


class _Shared(list[Any]):
    def __deepcopy__(self, memo: dict[int, Any]) -> "_Shared":
        return self


SHARED = _Shared()


@pytest.fixture
def alive() -> Iterator[list[Any]]:
    SHARED.clear()
    yield SHARED
    SHARED.clear()


HOOKS = ("setup", "configure_model", "configure_optimizers", "training_step", "on_fit_end")


@pytest.mark.parametrize("hook", HOOKS)
def test_member_that_fails_stops_no_other_and_is_let_go(
    tmp_path: Path, hook: str, alive: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    strategy = sequential(3, raise_on_failure=False)
    module, data = Unlucky(1, hook), make_data(tmp_path, num_folds=3)
    trainer = make_trainer(tmp_path, strategy=strategy)
    trainer.fit(module, data)
    assert [reference() for reference in alive] == [None, None]
    assert list(strategy.trainers) == [0, 2]
    assert statuses(strategy.results) == ["done", "failed", "done"]
    assert strategy.results is not None
    result = strategy.results.members[1]
    assert result.error == "ValueError: no luck"
    assert result.output is not None
    assert "Traceback" in Path(result.output).read_text()
    printed = capsys.readouterr()
    assert "member 1: ValueError: no luck" in printed.out
    assert "Traceback" in printed.err

    # It does not run in later stages.
    trainer.test(module, data, verbose=False)
    assert statuses(strategy.results) == ["done", "failed", "done"]
    assert strategy.results.members[1].error == "ValueError: no luck"
    assert [m.member for m in read_results(tmp_path, "test").members] == [0, 2]
    again = sequential(3)
    with pytest.raises(MemberError, match=r"1 of 3 members failed.*member 1: ValueError: no luck"):
        make_trainer(tmp_path, strategy=again).validate(module, data, verbose=False)
    # A new module is a new start, with the same data.
    fresh = sequential(3)
    make_trainer(tmp_path, strategy=fresh).fit(Unlucky(5, hook), data)
    assert statuses(fresh.results) == ["done"] * 3

    # The others are as without it.
    for member in (0, 2):
        assert torch.equal(weights(module_of(strategy, member)), weights(module_of(fresh, member)))


def test_first_member_that_fails_ends_after_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strategy = sequential(3)
    trainer = make_trainer(tmp_path, strategy=strategy)
    with pytest.raises(ValueError, match="no luck"):
        trainer.fit(Unlucky(0, "training_step"), make_data(tmp_path, num_folds=3))
    assert statuses(strategy.results) == ["failed", "done", "done"]
    assert list(strategy.trainers) == [1, 2]
    assert "member 0: ValueError: no luck" in capsys.readouterr().out


def test_failure_of_another_is_an_error_of_the_first(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, strategy=sequential())
    words = r"fit: 1 of 2 members failed.*member 1: SystemExit: 3 \(its output: .*member_1"
    with pytest.raises(MemberError, match=words):
        trainer.fit(Unlucky(1, "training_step", SystemExit(3)), make_data(tmp_path))


@pytest.mark.parametrize("member", range(3))
@pytest.mark.parametrize(
    ("error", "raised"), [(KeyboardInterrupt(), SystemExit), (bdb.BdbQuit(), bdb.BdbQuit)]
)
def test_user_who_ends_a_member_ends_all(
    tmp_path: Path,
    member: int,
    error: BaseException,
    raised: type[BaseException],
) -> None:
    trainer = make_trainer(tmp_path, strategy=sequential(3, raise_on_failure=False))
    with pytest.raises(raised):
        trainer.fit(Unlucky(member, "training_step", error), make_data(tmp_path, num_folds=3))
    results = read_results(tmp_path)
    assert statuses(results) == ["done"] * member + ["failed"]
    assert str(results.failed[0].error).startswith(type(error).__name__)


def test_sigterm_ends_all(tmp_path: Path) -> None:
    class Asking(Chosen):
        def on_train_batch_end(self, *args: Any) -> None:
            if self.member == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    trainer = make_trainer(tmp_path, strategy=sequential(3))
    with pytest.raises(SystemExit):
        trainer.fit(Asking(), make_data(tmp_path, num_folds=3))
    assert statuses(read_results(tmp_path)) == ["done", "failed"]


# Memory


def test_copies_live_no_longer_than_what_they_are_copies_of(tmp_path: Path) -> None:
    def fit() -> list[Any]:
        strategy = sequential()
        trainer, module = make_trainer(tmp_path, strategy=strategy), Regression()
        trainer.fit(module, make_data(tmp_path))
        alive = [trainer, module, strategy.trainers[1], module_of(strategy, 1)]
        return [weakref.ref(each) for each in alive]

    references = fit()
    let_copies_go()
    assert [reference() for reference in references] == [None] * 4


# What is refused


def test_member_is_not_known_before_a_stage(tmp_path: Path) -> None:
    strategy = sequential()
    words = "Use self.trainer.strategy.member in configure_model"
    with pytest.raises(RuntimeError, match=words):
        _ = strategy.member
    trainer = make_trainer(tmp_path, strategy=strategy)
    with pytest.raises(RuntimeError, match=words):
        _ = strategy.member
    trainer.fit(Regression(), make_data(tmp_path))
    assert strategy.member == 0


def test_one_member_is_trained_alone_by_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = sequential()
    make_trainer(tmp_path, strategy=together).fit(Regression(), make_data(tmp_path))
    monkeypatch.setenv(MEMBER_VARIABLE, "1")
    strategy = sequential()
    assert strategy.member == 1
    module = Regression()
    make_trainer(tmp_path, strategy=strategy).fit(module, make_data(tmp_path))
    assert torch.equal(weights(module), weights(module_of(together, 1)))
    assert strategy.results is None
    assert statuses(read_results(tmp_path)) == ["done", "done"]


def hook_of_closure() -> Regression:
    module = Regression()
    module.net[0].register_forward_hook(lambda *args: module.seen.setdefault("hook", []))
    return module


def compiled_in_place() -> Regression:
    module = Regression()
    module.net.compile(backend="eager")
    return module


def with_lock() -> Regression:
    module = Regression()
    module.lock = __import__("threading").Lock()  # type: ignore[assignment]
    return module


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (compiled_in_place, "compile[(][)] was called on Regression or a submodule"),
        (
            hook_of_closure,
            r"function hook_of_closure.<locals>.<lambda> \(.*_sequential.py, line \d+\)"
            " refers to the Regression",
        ),
        (with_lock, "something in them cannot be copied: TypeError: cannot pickle '_thread.lock'"),
    ],
    ids=["compiled in place", "closure", "lock"],
)
def test_what_cannot_be_each_members_own_is_refused(
    tmp_path: Path, make: Callable[[], Any], words: str
) -> None:
    trainer = make_trainer(tmp_path, strategy=sequential())
    with pytest.raises(UnsuitableModuleError, match=words):
        trainer.fit(make(), make_data(tmp_path))
    # Before anything was trained.
    assert not list(tmp_path.iterdir())


def test_module_that_was_refused_can_be_mended(tmp_path: Path) -> None:
    module, data = with_lock(), make_data(tmp_path)
    strategy = sequential(3)
    trainer = make_trainer(tmp_path, strategy=strategy)
    with pytest.raises(UnsuitableModuleError):
        trainer.fit(module, data)
    del module.lock
    strategy = sequential()
    make_trainer(tmp_path, strategy=strategy).fit(module, data)
    assert statuses(strategy.results) == ["done"] * MEMBERS


def test_checkpoint_of_the_first_member_is_refused_for_all(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, strategy=sequential(), enable_checkpointing=True)
    module, data = Regression(), make_data(tmp_path)
    trainer.fit(module, data)
    saver: Any = trainer.checkpoint_callback
    words = re.escape("belongs to member 0, and all members would load it: write {member}")
    with pytest.raises(ValueError, match=words):
        trainer.test(module, data, ckpt_path=saver.best_model_path)


def test_logger_of_one_run_is_refused(tmp_path: Path) -> None:
    class OneRun(WandbLogger):
        """Without the package."""

        def __init__(self) -> None:
            self._logged_metrics: Any = {}

        def finalize(self, status: str) -> None:
            """Nothing was begun."""

    trainer = make_trainer(tmp_path, strategy=sequential(), logger=OneRun())
    with pytest.raises(ValueError, match="WandbLogger with processes=False: it has one run"):
        trainer.fit(Regression(), make_data(tmp_path))


def test_module_of_fewer_members_is_refused(tmp_path: Path) -> None:
    module = Regression()
    make_trainer(tmp_path, strategy=sequential()).fit(module, make_data(tmp_path))
    trainer = make_trainer(tmp_path, strategy=sequential(3))
    with pytest.raises(ValueError, match="num_members=3: this Regression was trained by 2 members"):
        trainer.validate(module, make_data(tmp_path, num_folds=3))


def test_notebook_must_run_members_sequentially(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_memmap.strategies.independent.is_interactive", lambda: True)
    words = re.escape("with IndependentStrategy(num_members=2, processes=False)")
    with pytest.raises(ValueError, match=words):
        make_trainer(tmp_path, strategy=IndependentStrategy(num_members=2))
    for strategy in (sequential(), IndependentStrategy()):
        assert make_trainer(tmp_path, strategy=strategy).strategy is strategy
    # A member that is trained alone starts no process.
    monkeypatch.setenv(MEMBER_VARIABLE, "1")
    make_trainer(tmp_path, strategy=IndependentStrategy(num_members=2))
