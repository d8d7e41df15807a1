"""``memmap_independent``: each device trains its own model, and none waits for another."""

from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from lightning_memmap._compat.independent import move_outputs
from lightning_memmap._compat.modules import unless_none
from lightning_memmap.errors import MemberError, check_integer
from lightning_memmap.strategies.common.one_process import OneNode
from lightning_memmap.strategies.common.weighted_loss import WeightedLoss
from lightning_memmap.strategies.members.processes import (
    MEMBER_VARIABLE,
    MemberLauncher,
    member_of_this_process,
)
from lightning_memmap.strategies.members.results import MemberResults, folder_of


class IndependentStrategy(WeightedLoss, OneNode):
    """Trains members that exchange nothing: the folds of a k-fold, an ensemble, a model per site.

    The program runs once for each member, in its own process on its own device. Each member has
    its own Trainer with its own optimizers, checkpoints, loggers and early stopping, and its
    weights are bit for bit equal to those from a run by itself. The program chooses its data and
    its model by ``member``; a `MemmapDataModule` chooses the member's fold or subset by it.

    A Trainer writes to a folder ``member_<m>`` for each member: below its ``default_root_dir``, the
    ``save_dir`` of CSV and TensorBoard loggers, and the ``dirpath`` of a ``ModelCheckpoint``. The
    process that the user started is member 0. At the end of each stage it waits until the others
    have completed theirs, and prints one table. A member that fails does not stop the others.

    Args:
        num_members: Number of members; by default one per device. If there are more members than
            devices, member ``m`` has device ``m % devices``.
        raise_on_failure: Whether member 0 raises an error, once all others have ended, if one of
            them failed. Otherwise it continues, and ``results`` says which ones failed.
        **kwargs: As for Lightning's ``SingleDeviceStrategy``.

    Raises:
        ValueError: ``num_members`` is below 1 or below the number of devices, the environment
            variable ``LIGHTNING_MEMMAP_MEMBER`` is not a member, the Trainer asks for more than
            one node, or the program was launched in several processes.
        MisconfigurationException: The program is a notebook, and there are several members.
        MemberError: With ``raise_on_failure``, at the end of a stage in which a member failed.
    """

    strategy_name = "memmap_independent"
    #: Members have no common result that could be compared with another strategy's.
    trains_one_model = False
    runs_how = "starts the processes of its members"
    advice = (
        f"on another machine, start the program with {MEMBER_VARIABLE}=<member> for each of its"
        " members; to train one model in all processes, use strategy='memmap_superbatch_ddp'"
    )

    def __init__(
        self, num_members: int | None = None, raise_on_failure: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        if num_members is not None:
            check_integer("num_members", num_members, 1, "at least 1; omit it for one per device")
        self._count = num_members
        self.raise_on_failure = raise_on_failure
        self._members: MemberLauncher | None = None

    @property
    def member(self) -> int:
        """The member that this process trains, counted from 0. Known before there is a Trainer.

        Raises:
            ValueError: The environment variable ``LIGHTNING_MEMMAP_MEMBER`` is not a number.
        """
        return member_of_this_process() or 0

    @property
    def num_members(self) -> int:
        """The number of members, by default one per device of the Trainer."""
        return self._count or len(self.parallel_devices) or 1

    # Processes of the run on this machine.
    num_processes = num_members

    @property
    @override
    def processes_per_device(self) -> int:  # type: ignore[override]
        """The number of members that hold their data on this member's device."""
        num_devices = max(1, len(self.parallel_devices))
        return len(range(self.member % num_devices, self.num_members, num_devices))

    @property
    def results(self) -> MemberResults | None:
        """How the latest stage ended for all members.

        None before the end of a stage, and in processes that the user has not started.
        """
        return None if self._members is None else self._members.results

    @property
    @override
    def root_device(self) -> torch.device:
        devices = self.parallel_devices
        return devices[self.member % len(devices)] if devices else super().root_device

    @override
    def check_devices(self) -> None:
        devices = self.parallel_devices
        if self._count is not None and self._count < len(devices):
            raise ValueError(
                f"num_members={self._count} with Trainer(devices={len(devices)}): some devices"
                f" would be idle; use devices={self._count}"
            )
        if self.member >= self.num_members:
            raise ValueError(
                f"{MEMBER_VARIABLE}={self.member}: there are {self.num_members} members, counted"
                " from 0"
            )

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        self._members = MemberLauncher(self.member, self.num_members, self.raise_on_failure)
        self._launcher = self._members

    @override
    def setup_environment(self) -> None:
        # The module's configure_callbacks may have added callbacks.
        module = self.lightning_module
        if module is not None:
            move_outputs(module.trainer, folder_of(self.member))
        super().setup_environment()

    @override
    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint; ``{member}`` in its path is replaced by the number of this member."""
        path = str(checkpoint_path).replace("{member}", str(self.member))
        return super().load_checkpoint(path, *unless_none(weights_only))

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if isinstance(exception, (KeyboardInterrupt, MemberError)):
            return
        # If only member 0 failed, the others train to their end.
        members = self._members
        if members is not None and members.is_first and members.root is not None:
            members.show_results()
