"""Placement: the plan is pure, so that devices which are not here can be planned for."""

from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from rich.console import Console

from lightning_memmap.errors import PlacementError
from lightning_memmap.placement import topology
from lightning_memmap.placement.plan import (
    Placement,
    Residency,
    check_residency,
    placement_table,
    plan_placement,
)
from lightning_memmap.placement.topology import (
    DataTopology,
    check_device,
    check_memory_fraction,
    compute_budgets,
    count_local_processes,
    measure_free_bytes,
)
from lightning_memmap.sampling.rows import Shards, shard_rows
from lightning_memmap.sampling.schedule import Blocks
from lightning_memmap.schema.fields import Field
from lightning_memmap.sizes import format_bytes, parse_bytes
from lightning_memmap.store.columns import FixedColumn
from lightning_memmap.strategies import IndependentStrategy, SuperBatchDDPStrategy
from tests.support.rows import size_of

CPU = torch.device("cpu")
GPUS = tuple(torch.device("cuda", index) for index in range(8))
DEVICE, HOST, MMAP = Residency.DEVICE, Residency.HOST, Residency.MMAP


@dataclass(frozen=True)
class Size:
    """A store as the plan sees it."""

    num_rows: int
    num_shards: int = 24
    row_bytes: int = 10

    @property
    def shards(self) -> Shards:
        return Shards(self.num_rows, self.num_shards)

    @property
    def columns(self) -> list[FixedColumn]:
        return [FixedColumn(Field("x", torch.uint8, (self.row_bytes,)), self.shards)]

    def block_bytes(self, blocks: Blocks, held: Sequence[int]) -> int:
        return len(held) * blocks.max_rows_per_shard * self.row_bytes


def plan(
    stores: dict[str, Size],
    devices: tuple[torch.device, ...],
    residency: str = "auto",
    *,
    budget: int = 2**40,
    host: int = 2**40,
    rank: int = 0,
    size: int = 1,
    window: int | None = None,
) -> Placement:
    topology = DataTopology(devices, rank, size)
    return plan_placement(
        {
            name: size_of(store, topology, window=window, measure=store.block_bytes, split=name)
            for name, store in stores.items()
        },
        topology,
        residency,
        budget_bytes={**dict.fromkeys(devices, budget), CPU: host},
    )


def count(placement: Placement, split: str = "train") -> dict[Residency | None, int]:
    found = placement.splits[split].residencies
    return {residency: found.count(residency) for residency in set(found)}


@pytest.mark.parametrize(
    ("devices", "residency", "budget", "host", "expected"),
    [
        # 24 shards of 10 rows of 10 bytes. On devices first, then the host, shard by shard.
        (GPUS[:4], "auto", 2**40, 2**40, {DEVICE: 24}),
        (GPUS[:2], "auto", 399, 2**40, {DEVICE: 6, HOST: 18}),
        (GPUS[:2], "auto", 300, 450, {DEVICE: 6, HOST: 4, MMAP: 14}),
        # One device that is named twice has one budget.
        (GPUS[:1] * 2, "auto", 700, 0, {DEVICE: 7, MMAP: 17}),
        ((CPU,) * 4, "auto", 2**40, 2**40, {MMAP: 24}),
        (GPUS[:2], "device", 1200, 0, {DEVICE: 24}),
        ((CPU,), "device", 2400, 2400, {DEVICE: 24}),
        (GPUS[:2], "host", 0, 2400, {HOST: 24}),
        ((CPU,), "host", 0, 2400, {HOST: 24}),
        (GPUS[:2], "mmap", 0, 0, {MMAP: 24}),
    ],
)
def test_plan_puts_shards_where_there_is_room(
    devices: tuple[torch.device, ...],
    residency: str,
    budget: int,
    host: int,
    expected: dict[Residency, int],
) -> None:
    assert (
        count(plan({"train": Size(240)}, devices, residency, budget=budget, host=host)) == expected
    )


class TestAuto:
    def test_plan_of_several_splits_serves_the_first_one_first(self) -> None:
        stores = {"train": Size(240), "val": Size(240)}
        placement = plan(stores, GPUS[:1], budget=2500, host=1000)
        assert count(placement, "train") == {DEVICE: 24}
        assert count(placement, "val") == {DEVICE: 1, HOST: 10, MMAP: 13}

    def test_plan_on_unequal_gpus_fills_each_up_to_its_budget(self) -> None:
        topology = DataTopology(GPUS[:2])
        placement = plan_placement(
            {"train": size_of(Size(240), topology)},
            topology,
            budget_bytes={GPUS[0]: 0, GPUS[1]: 2**20, CPU: 0},
        )
        assert placement.splits["train"].residencies == (MMAP, DEVICE) * 12

    def test_plan_of_one_of_several_processes_is_of_its_own_shards(self) -> None:
        for rank in range(4):
            placement = plan({"train": Size(240)}, (GPUS[rank],), rank=rank, size=4)
            found = placement.splits["train"].residencies
            assert found == tuple(DEVICE if shard % 4 == rank else None for shard in range(24))

    @given(
        num_rows=st.integers(8, 500),
        num_shards=st.sampled_from([8, 24, 40]),
        num_devices=st.sampled_from([1, 2, 4, 8]),
        budget=st.integers(0, 6000),
        host=st.integers(0, 6000),
    )
    def test_plan_within_any_budget_keeps_to_it(
        self, num_rows: int, num_shards: int, num_devices: int, budget: int, host: int
    ) -> None:
        devices = GPUS[:num_devices]
        store = Size(num_rows, num_shards)
        placement = plan({"train": store}, devices, budget=budget, host=host)
        sizes = (shard_rows(num_rows, num_shards) * store.row_bytes).tolist()
        used = dict.fromkeys((*range(num_devices), "host"), 0)
        for shard, residency in enumerate(placement.splits["train"].residencies):
            place = "host" if residency is HOST else shard % num_devices
            used[place] += sizes[shard] * (residency is not MMAP)
        assert used.pop("host") <= host
        assert max(used.values()) <= budget
        total = sum(sizes)
        if max(sizes) * -(-num_shards // num_devices) <= budget:
            assert sum(used.values()) == total


@pytest.mark.parametrize(
    ("devices", "residency", "parts"),
    [
        (
            GPUS[:2],
            "device",
            ["cuda:0 need 1200", "1199 bytes", "more data devices", "residency='auto'"],
        ),
        (GPUS[:2], "host", ["cpu need 2400", "2399 bytes", "memory_fraction", "'mmap'"]),
        ((CPU,), "host", ["cpu need 2400", "2399 bytes", "memory_fraction", "'mmap'"]),
    ],
)
def test_what_does_not_fit_is_refused_with_both_numbers_and_alternatives(
    devices: tuple[torch.device, ...], residency: str, parts: list[str]
) -> None:
    with pytest.raises(PlacementError) as caught:
        plan({"train": Size(240)}, devices, residency, budget=1199, host=2399)
    assert all(part in str(caught.value) for part in parts)


def test_unknown_residency_raises_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"residency='gpu'.*auto, device, host, mmap"):
        check_residency("gpu")


class TestStream:
    def test_window_of_each_split_is_of_its_store_alone(self) -> None:
        stores = {"train": Size(10**9, row_bytes=1000), "val": Size(10**6, row_bytes=100_000)}
        for devices in (GPUS[:1], GPUS[:4], (CPU,)):
            splits = plan(stores, devices, "stream", budget=0).splits
            # 512 MiB of 24 shards.
            assert [split.order.shuffle_block for split in splits.values()] == [22_369, 223]

    def test_windows_that_do_not_fit_raise_with_the_largest_that_does(self) -> None:
        stores = {"train": Size(24_000), "val": Size(2400)}
        # Two windows of 100 rows of 10 bytes of each of 24 shards, of both splits.
        fits = {"window": 100, "host": 2 * 2 * 100 * 10 * 24}
        assert plan(stores, (CPU,), "stream", **fits).splits["val"].order.shuffle_block == 100
        with pytest.raises(PlacementError) as caught:
            plan(stores, (CPU,), "stream", window=101, host=96_000)
        for part in ("residency='stream'", "need 96480", "96000", "shuffle_block=100 "):
            assert part in str(caught.value)
        # A shard of the second split has 100 rows and no more.
        assert plan(stores, (CPU,), "stream", window=101, host=96_480)
        with pytest.raises(PlacementError, match=r"residency=.stream.*one row"):
            plan({"train": Size(240)}, (CPU,), "stream", window=1, host=479)
        # A process of two has half of the shards.
        half = plan(stores, (CPU,), "stream", size=2, window=200, host=72_000)
        assert half.splits["train"].residencies.count(None) == 12


class TestStriping:
    def test_plan_with_fewer_rows_than_devices_raises_with_the_most_devices(self) -> None:
        with pytest.raises(PlacementError, match=r"val split .*7 rows.*8 .*at most 7"):
            plan({"train": Size(240), "val": Size(7)}, GPUS)

    def test_plan_with_devices_that_do_not_divide_has_more_shards(self) -> None:
        assert plan({"train": Size(240)}, GPUS[:5]).splits["train"].pool.num_shards == 25


class TestTable:
    def test_table_of_mixed_placement_names_devices_rows_and_bytes(self) -> None:
        stores = {"train": Size(240)}
        output = StringIO()
        Console(width=200, file=output).print(
            placement_table(plan(stores, GPUS[:2], budget=300, host=450))
        )
        lines = [
            [cell.strip() for cell in line.split("│")[1:-1]]
            for line in output.getvalue().splitlines()
            if "cuda" in line
        ]
        assert lines == [
            ["0: cuda:0", "train", "device", "3", "30", "300 B", "300 B"],
            ["0: cuda:0", "train", "host", "2", "20", "200 B", "450 B"],
            ["0: cuda:0", "train", "mmap", "7", "70", "700 B", "-"],
            ["1: cuda:1", "train", "device", "3", "30", "300 B", "300 B"],
            ["1: cuda:1", "train", "host", "2", "20", "200 B", "450 B"],
            ["1: cuda:1", "train", "mmap", "7", "70", "700 B", "-"],
        ]


class TestBudgets:
    @given(free=st.integers(0, 2**40), fraction=st.floats(0.01, 1), processes=st.integers(1, 64))
    def test_processes_of_one_machine_share_its_memory(
        self, free: int, fraction: float, processes: int
    ) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(topology, "available_bytes", lambda: free)
            shared = DataTopology((CPU, CPU), num_local_processes=processes)
            budget = compute_budgets(shared, fraction)[CPU]
            alone = compute_budgets(DataTopology((CPU,)), fraction)[CPU]
        assert budget * processes <= alone <= free * fraction
        assert budget * processes > alone - processes

    def test_memory_of_an_accelerator_that_is_kept_for_later_is_free(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        module = SimpleNamespace(
            device_count=lambda: 2,
            mem_get_info=lambda device: (1000, 8000),
            memory_reserved=lambda device: 500,
            memory_allocated=lambda device: 300,
        )
        monkeypatch.setattr(torch, "get_device_module", lambda device: module)
        assert measure_free_bytes(torch.device("xpu", 1)) == 1200
        with pytest.raises(ValueError, match=r"xpu:2 .*cpu, xpu:0, xpu:1"):
            measure_free_bytes(torch.device("xpu", 2))

    @pytest.mark.parametrize(("member", "sharing"), [(0, 3), (1, 2), (2, 3), (4, 3)])
    def test_members_on_one_device_share_its_memory(
        self, monkeypatch: pytest.MonkeyPatch, member: int, sharing: int
    ) -> None:
        monkeypatch.setenv("LIGHTNING_MEMMAP_MEMBER", str(member))
        monkeypatch.setattr(topology, "measure_free_bytes", lambda device: 6000)
        strategy = IndependentStrategy(num_members=5)
        strategy.parallel_devices = GPUS[:2]
        budgets = compute_budgets(topology.find_topology(strategy), 0.5)
        assert budgets == {GPUS[member % 2]: 3000 // sharing, CPU: 3000 // 5}

    def test_run_of_several_processes_says_how_many_share_the_machine(self) -> None:
        for strategy, expected in (
            (SingleDeviceStrategy("cpu"), 1),
            (DDPStrategy(parallel_devices=[CPU] * 3), 3),
            (SuperBatchDDPStrategy(2, parallel_devices=[CPU] * 6), 3),
            (IndependentStrategy(num_members=5), 5),
        ):
            assert count_local_processes(strategy) == expected


class TestDevices:
    @pytest.mark.parametrize("name", [f"cuda:{torch.cuda.device_count()}", "meta", "xpu:0"])
    def test_check_device_that_is_not_here_raises_with_those_that_are(self, name: str) -> None:
        with pytest.raises(ValueError, match=rf"{name} .* cpu"):
            check_device(torch.device(name))

    @pytest.mark.parametrize("fraction", [0, -0.1, 1.01, float("nan")])
    def test_fraction_out_of_bounds_raises(self, fraction: float) -> None:
        with pytest.raises(ValueError, match=f"memory_fraction={fraction}"):
            check_memory_fraction(fraction)


class TestBytes:
    @pytest.mark.parametrize(
        ("text", "count"),
        [
            ("4096", 4096),
            ("0", 0),
            ("1B", 1),
            ("80GiB", 80 * 2**30),
            (" 1.5 TB ", 1_500_000_000_000),
            ("1.5TiB", 3 * 2**39),
            ("3K", 3000),
            ("3Ki", 3072),
            ("2 MB", 2_000_000),
        ],
    )
    def test_parse_bytes_with_unit_gives_bytes(self, text: str, count: int) -> None:
        assert parse_bytes(text) == count

    @pytest.mark.parametrize(
        "text", ["", "GiB", "-1GiB", "80 Gib x", "1e9", "1.GB", "i", "5iB", "80gib", "nan", "1 PB"]
    )
    def test_parse_bytes_without_number_or_unit_raises(self, text: str) -> None:
        with pytest.raises(ValueError, match="80GiB"):
            parse_bytes(text)

    @pytest.mark.parametrize(
        ("count", "text"),
        [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (1536, "1.5 KiB"),
            (80 * 2**30, "80.0 GiB"),
            (3 * 2**39, "1.5 TiB"),
            (2**51, "2048.0 TiB"),
        ],
    )
    def test_format_bytes_uses_binary_units(self, count: int, text: str) -> None:
        assert format_bytes(count) == text
