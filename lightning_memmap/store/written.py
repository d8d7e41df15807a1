"""How each build of a store ends: its files are finished and hashed; a manifest commits them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version

import tensordict
import torch

from lightning_memmap.errors import StoreError
from lightning_memmap.store.checksums import compute_checksums
from lightning_memmap.store.columns import Column
from lightning_memmap.store.files import check_plain, sync_path
from lightning_memmap.store.fingerprint import Fingerprint
from lightning_memmap.store.hashing import hash_row
from lightning_memmap.store.manifest import Manifest
from lightning_memmap.store.plan import StorePlan
from lightning_memmap.store.probes import probe_rows, random_dataset_error
from lightning_memmap.store.progress import ShowProgress
from lightning_memmap.store.recovery import put_in_place, remove_tree


@dataclass(frozen=True)
class WrittenStore:
    """The files of a store with all its rows, hashed, and without a manifest.

    Args:
        plan: The store.
        columns: The columns as the manifest is to record them.
        checksums: The checksum of each shard, by field name.
    """

    plan: StorePlan
    columns: tuple[Column, ...]
    checksums: Mapping[str, Sequence[str]]

    @classmethod
    def finish(cls, plan: StorePlan, num_threads: int, progress: ShowProgress) -> "WrittenStore":
        """Finish the files once all rows are written, and hash them.

        Args:
            plan: The store.
            num_threads: Threads that read and hash, at least 2.
            progress: Shows the progress.
        """
        columns = tuple(column.finish(plan.building) for column in plan.columns)
        for column in columns:
            for name, size in column.file_bytes.items():
                if (found := check_plain(plan.building / name)) != size:
                    raise StoreError(f"{plan.building / name} has {found} bytes, and not {size}")
        num_bytes = sum(size for column in columns for size in column.file_bytes.values())
        with progress("checksums", num_bytes, 1) as advance:
            checksums = compute_checksums(
                plan.building, columns, num_threads=max(2, num_threads), advance=advance
            )
        return cls(plan, columns, checksums)

    def probes(self) -> tuple[tuple[int, str], ...]:
        """Row and hash of the probe rows, as they lie in the files."""
        return tuple((row, self._hash_row(row)) for row in probe_rows(self.plan.num_rows))

    def check(self, probes: tuple[tuple[int, str], ...]) -> None:
        """Compare rows with what was written of them. Where one differs, nothing is kept.

        Args:
            probes: Row and hash of each.

        Raises:
            DatasetError: One differs: the dataset is random.
        """
        for row, expected in probes:
            if self._hash_row(row) != expected:
                names = ", ".join(field.name for field in self.plan.schema.fields)
                remove_tree(self.plan.building)
                raise random_dataset_error(row, names)

    def commit(
        self,
        probes: tuple[tuple[int, str], ...],
        source: Mapping[str, str],
        fingerprint: Fingerprint | None = None,
    ) -> None:
        """Write the manifest, which makes the files a store, and put the store in place.

        All rows must be on the disk, and this process must have the lock.

        Args:
            probes: Row and hash of the probe rows.
            source: Where the rows came from, for people to read. Time and versions are added.
            fingerprint: The identity of the dataset; None if the rows do not come from one.

        Raises:
            StoreError: The manifest could not be read again.
            OSError: The manifest cannot be written, or the store not be moved into place.
        """
        plan = self.plan
        source = {
            **source,
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "lightning_memmap": version("lightning_memmap"),
            # Looking up the version of an installed package takes milliseconds.
            "torch": str(torch.__version__),
            "tensordict": str(tensordict.__version__),
        }
        manifest = Manifest(
            plan.shards,
            plan.schema,
            self.columns,
            probes,
            self.checksums,
            source,
            fingerprint,
            plan.classes,
        )
        manifest.write(plan.building)
        sync_path(plan.building)
        put_in_place(plan.path, plan.building)

    def _hash_row(self, row: int) -> str:
        return hash_row([column.read(self.plan.building, row) for column in self.columns])
