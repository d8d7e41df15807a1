"""Models of transformers and peft under FSDP2 train, and are saved, as on one device."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, BertConfig, LlamaConfig

from lightning_memmap import MemmapDataModule
from lightning_memmap.errors import RankMismatchError
from lightning_memmap.strategies import FSDP2Strategy
from tests.support import preloaded
from tests.support.models import make_trainer
from tests.support.processes import launch, sorted_steps
from tests.support.versions import weights_only

#: float32 sums in another order, over six steps that move weights by about 0.02.
ATOL = 1e-6

pytestmark = pytest.mark.slow


ROWS = 63
GLOBAL_BATCH = 12
VOCABULARY = 48
LENGTH = 10

CONFIGS = {
    "llama": lambda: LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        use_cache=False,
    ),
    "bert": lambda: BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    ),
}
CLASSES: dict[str, Any] = {"llama": AutoModelForCausalLM, "bert": AutoModelForMaskedLM}
LAYERS = {"llama": "LlamaDecoderLayer", "bert": "BertLayer"}


class Sequences(Dataset[dict[str, Tensor]]):
    """Sequences of tokens, each the sum of the two before it."""

    def __init__(self) -> None:
        rows = torch.arange(ROWS)
        tokens = [rows % 7, rows % 5 + 1]
        for _ in range(LENGTH - 2):
            tokens.append((tokens[-1] + tokens[-2]) % VOCABULARY)
        self.tokens = torch.stack(tokens, 1)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"row": torch.tensor(row), "tokens": self.tokens[row]}


class Language(L.LightningModule):
    """A pretrained model, which rank 0 alone loads.

    Args:
        kind: ``llama`` or ``bert``.
        pretrained: The folder of the model.
        lora: Train adapters only.
        dtype: Of the pretrained weights.
    """

    def __init__(
        self, kind: str, pretrained: str, lora: bool = False, dtype: str = "float32"
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.kind = kind
        self.pretrained = pretrained
        self.lora = lora
        self.dtype_of_weights = getattr(torch, dtype)
        self.model: Any = None
        self.losses: list[float] = []
        self.seen: list[list[int]] = []
        self.were_meta = False

    def configure_model(self) -> None:
        if self.model is not None:
            return
        auto, dtype = CLASSES[self.kind], self.dtype_of_weights
        if self.global_rank == 0:
            self.model = auto.from_pretrained(self.pretrained, dtype=dtype).train()
        else:
            with torch.device("meta"):
                self.model = auto.from_config(CONFIGS[self.kind](), dtype=dtype).train()
        if self.lora:
            layers = ["q_proj", "v_proj"]
            # The command chooses a seed, and adapters begin with random values.
            torch.manual_seed(4)
            self.model = get_peft_model(self.model, LoraConfig(r=4, target_modules=layers))
        tensors = [*self.model.parameters(), *self.model.buffers()]
        self.were_meta = all(tensor.is_meta for tensor in tensors)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.seen.append(batch["row"].tolist())
        tokens = batch["tokens"]
        logits = self.model(tokens).logits
        loss = nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten()
        )
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [param for param in self.parameters() if param.requires_grad]
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9)


def prepare(out: Path) -> None:
    """Save a pretrained model of each kind."""
    for kind, config in CONFIGS.items():
        torch.manual_seed(3)
        CLASSES[kind].from_config(config()).save_pretrained(out / kind)


def fit(
    out: Path,
    save: str,
    kind: str,
    processes: int,
    checkpoint: Path | None = None,
    trainer_options: dict[str, Any] | None = None,
    module_options: dict[str, Any] | None = None,
    strict: bool = True,
    *,
    pretrained: Path,
    **options: Any,
) -> Any:
    """Train two epochs, with checkpoints after steps 2, 4 and 6; return the module."""
    wrapped = {"wrap_classes": [LAYERS[kind]], **options}
    strategy: Any = FSDP2Strategy(**wrapped) if processes > 1 else "memmap_superbatch"
    trainer = make_trainer(
        out,
        strategy=strategy,
        devices=processes,
        max_epochs=2,
        limit_val_batches=0,
        gradient_clip_val=0.5,
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(out / save, "{step}", every_n_train_steps=2, save_top_k=-1)],
        **({"accumulate_grad_batches": 2} | (trainer_options or {})),
    )
    module = Language(kind, str(pretrained / kind), **(module_options or {}))
    module.strict_loading = strict
    batch_size = GLOBAL_BATCH // processes
    data = MemmapDataModule(Sequences(), store_dir=out / "stores", batch_size=batch_size)
    trainer.fit(module, data, ckpt_path=checkpoint, **weights_only(checkpoint and False))
    trainer.save_checkpoint(out / f"{save}.ckpt")
    return module


def report(module: Any) -> dict[str, Any]:
    return {"losses": module.losses, "seen": module.seen, "were_meta": module.were_meta}


#: Runs of adapters that differ in how they are saved and in the dtype of the frozen weights.
ADAPTERS: dict[str, dict[str, Any]] = {
    "adapters": {},
    "adapters folder": {"save_distributed_checkpoint": True},
    "adapters bf16": {
        "trainer_options": {"precision": "bf16-mixed", "accumulate_grad_batches": 2},
        "module_options": {"lora": True, "dtype": "bfloat16"},
    },
}


def run_one(out: Path, pretrained: Path, checkpoints: Path | None = None) -> dict[str, Any]:
    """One process, from the beginning or from checkpoints of other numbers of processes."""
    adapters: dict[str, Any] = {"module_options": {"lora": True}}
    found = {}
    for name, kind, options in (
        ("llama", "llama", {}),
        ("bert", "bert", {}),
        ("adapters", "llama", adapters),
    ):
        path = checkpoints / name / "step=2.ckpt" if checkpoints else None
        strict = name != "adapters"
        module = fit(out, name, kind, 1, path, pretrained=pretrained, strict=strict, **options)
        found[name] = report(module)
    return found


def run_two(out: Path, pretrained: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in CONFIGS:
        found[kind] = report(fit(out, kind, kind, 2, pretrained=pretrained))
    folder = {"save_distributed_checkpoint": True}
    fit(out, "llama folder", "llama", 2, pretrained=pretrained, **folder)
    for name, options in ADAPTERS.items():
        options = {"module_options": {"lora": True}, "exclude_frozen_parameters": True, **options}
        found[name] = report(fit(out, name, "llama", 2, pretrained=pretrained, **options))
        path = out / name / "step=2.ckpt"
        resumed = fit(out, f"{name} resumed", "llama", 2, path, pretrained=pretrained, **options)
        found[f"{name} resumed"] = report(resumed)
    with count_graphs() as graphs:
        options = {"compile_units": True, "activation_checkpointing": 2}
        fit(out, "compiled", "llama", 2, pretrained=pretrained, **options)
    found["graphs"] = len(graphs)
    found["errors"] = errors(out, pretrained)
    return found


@contextmanager
def count_graphs() -> Iterator[list[Any]]:
    """Count what torch.compile compiles; without code for the processor, which takes long."""
    graphs: list[Any] = []
    compile_forward = torch.compile

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    with patch("torch.compile", partial(compile_forward, backend=backend)):
        yield graphs


def errors(out: Path, base: Path) -> dict[str, str]:
    """What raises on every rank because their modules differ."""

    class Evaluating(Language):
        def configure_model(self) -> None:
            super().configure_model()
            self.model.train(self.global_rank != 0)

    class Mixed(Language):
        def configure_model(self) -> None:
            super().configure_model()
            if self.global_rank:
                self.model.bfloat16()

    found = {}
    for make in (Evaluating, Mixed):
        trainer = make_trainer(out, strategy=FSDP2Strategy(wrap_classes=["BertLayer"]), devices=2)
        data = MemmapDataModule(Sequences(), store_dir=out / "stores", batch_size=6)
        try:
            trainer.fit(make("bert", str(base / "bert")), data)
        except RankMismatchError as error:
            found[make.__name__] = str(error)
    return found


#: By name, the kind of model in checkpoints of two processes: files, and a folder of one kind.
SAVED = {"llama": "llama", "llama folder": "llama", "bert": "bert"}


def run_four(out: Path, pretrained: Path, checkpoints: Path) -> dict[str, Any]:
    found = {}
    for name, kind in SAVED.items():
        path = checkpoints / name / "step=2.ckpt"
        found[name] = report(fit(out, name, kind, 4, path, pretrained=pretrained))
    path = checkpoints / "adapters" / "step=2.ckpt"
    options = {"module_options": {"lora": True}, "exclude_frozen_parameters": True}
    fit(out, "adapters", "llama", 4, path, pretrained=pretrained, **options)
    return found


class Runs:
    """What the processes of runs reported, and the checkpoints that they wrote."""

    def __init__(self, out: Path, function: Any, processes: int, **options: Any) -> None:
        self.out = out
        self.ranks = launch(function, out, processes=processes, **options)

    def state(self, name: str) -> dict[str, Tensor]:
        path = self.out / f"{name}.ckpt"
        return torch.load(path, weights_only=True)["state_dict"]  # type: ignore[no-any-return]

    def steps(self, name: str) -> list[list[int]]:
        return sorted_steps([rank[name]["seen"] for rank in self.ranks])


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pretrained")
    prepare(out)
    return out


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, pretrained: Path) -> Runs:
    return Runs(tmp_path_factory.mktemp("one"), run_one, 1, pretrained=pretrained)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, pretrained: Path) -> Runs:
    return Runs(tmp_path_factory.mktemp("two"), run_two, 2, pretrained=pretrained)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory, pretrained: Path, two: Runs) -> Runs:
    out = tmp_path_factory.mktemp("four")
    return Runs(out, run_four, 4, pretrained=pretrained, checkpoints=two.out)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory, pretrained: Path, two: Runs) -> Runs:
    out = tmp_path_factory.mktemp("resumed")
    return Runs(out, run_one, 1, pretrained=pretrained, checkpoints=two.out)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], atol: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        torch.testing.assert_close(found[name], value, rtol=0, atol=atol)


def max_change(state: dict[str, Tensor], before: dict[str, Tensor]) -> float:
    return max(float((state[name] - value).abs().max()) for name, value in before.items())


@pytest.mark.parametrize("kind", CONFIGS)
def test_model_that_rank_0_alone_has_loaded_trains_as_on_one_device(
    two: Runs, one: Runs, pretrained: Path, kind: str
) -> None:
    assert [rank[kind]["were_meta"] for rank in two.ranks] == [False, True]
    assert_close(two.state(kind), one.state(kind), ATOL)
    assert two.steps(kind) == one.steps(kind)
    before = Language(kind, str(pretrained / kind))
    before.configure_model()
    assert max_change(one.state(kind), before.state_dict()) > 0.01


@pytest.mark.parametrize("name", SAVED)
def test_resume_on_four_processes(two: Runs, one: Runs, four: Runs, name: str) -> None:
    assert_close(four.state(name), one.state(SAVED[name]), ATOL)
    # Two micro-batches each.
    assert four.steps(name) == one.steps(SAVED[name])[4:]


@pytest.mark.parametrize("name", [*CONFIGS, "adapters"])
def test_resume_on_one_process(one: Runs, resumed: Runs, name: str) -> None:
    whole = one.state(name)
    if name == "adapters":
        whole = {key: value for key, value in whole.items() if "lora_" in key}
        assert_close({key: resumed.state(name)[key] for key in whole}, whole, ATOL)
    else:
        assert_close(resumed.state(name), whole, ATOL)


@pytest.mark.parametrize("name", SAVED)
def test_weights_of_a_checkpoint_are_a_pretrained_model(
    two: Runs, tmp_path: Path, pretrained: Path, name: str
) -> None:
    kind, path = SAVED[name], two.out / f"{name}.ckpt"
    if path.is_file():
        module = Language.load_from_checkpoint(path, **weights_only(True))
    else:
        dcp_to_torch_save(path, tmp_path / "one.pt")
        module = Language(kind, str(pretrained / kind))
        module.configure_model()
        module.load_state_dict(torch.load(tmp_path / "one.pt", weights_only=True)["state_dict"])
    module.model.save_pretrained(tmp_path / "model")
    model = CLASSES[kind].from_pretrained(tmp_path / "model")
    tokens = Sequences().tokens[:3]
    assert torch.equal(model(tokens).logits, module.eval().model(tokens).logits)
    weights = {f"model.{name}": value for name, value in model.state_dict().items()}
    assert_close(weights, two.state(kind), 0)


def test_adapters_train_alone_and_as_on_one_device(two: Runs, one: Runs) -> None:
    whole = one.state("adapters")
    adapters = {name: value for name, value in whole.items() if "lora_" in name}
    assert_close(two.state("adapters"), adapters, ATOL)
    assert two.steps("adapters") == one.steps("adapters")
    assert 0 < len(adapters) < len(whole) / 2


@pytest.mark.parametrize("name", ["adapters", "adapters folder", "adapters bf16"])
def test_adapters_resume(two: Runs, four: Runs, name: str) -> None:
    losses = two.ranks[0][name]["losses"]
    assert two.ranks[0][f"{name} resumed"]["losses"] == losses[4:]
    if name == "adapters":
        assert_close(four.state(name), two.state(name), ATOL)
    if name != "adapters folder":
        assert_close(two.state(f"{name} resumed"), two.state(name), 0)
        # Also beside frozen weights in bfloat16.
        assert {value.dtype for value in two.state(name).values()} == {torch.float32}


# peft asks transformers for a name that will be removed.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.filterwarnings("ignore:Found keys that are in the model state dict but not")
def test_adapters_of_a_checkpoint_are_loaded_by_peft(
    two: Runs, one: Runs, tmp_path: Path, pretrained: Path
) -> None:
    path = two.out / "adapters.ckpt"
    module = Language.load_from_checkpoint(path, strict=False, **weights_only(True))
    module.model.save_pretrained(tmp_path / "adapter")
    base = CLASSES["llama"].from_pretrained(pretrained / "llama")
    model = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    whole = Language("llama", str(pretrained / "llama"), lora=True)
    whole.configure_model()
    tokens = Sequences().tokens[:3]
    before = whole.eval().model(tokens).logits
    whole.load_state_dict(one.state("adapters"))
    expected = whole.model(tokens).logits
    torch.testing.assert_close(model(tokens).logits, expected, rtol=0, atol=10 * ATOL)
    assert float((expected - before).detach().abs().max()) > 1e-3


def test_compiled_layers_share_their_code(two: Runs) -> None:
    # Every second one recomputes its activations, and the last step has other shapes.
    assert [rank["graphs"] for rank in two.ranks] == [4, 4]
    assert_close(two.state("compiled"), two.state("llama"), ATOL)


#: Of `Language` and of the strategy, in a config, and the run on one device that trains the same.
CONFIGURED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({}, {"activation_checkpointing": 2, "sync_each_micro_batch": True}),
    "adapters": (
        {"lora": True},
        {"activation_checkpointing": 3, "exclude_frozen_parameters": True},
    ),
}


@pytest.mark.parametrize("name", CONFIGURED)
def test_options_from_a_config_train_as_on_one_device(
    one: Runs, tmp_path: Path, pretrained: Path, name: str
) -> None:
    module_options, strategy_options = CONFIGURED[name]
    here = "tests.contract.strategies.test_huggingface"
    wrapped = {"wrap_classes": ["LlamaDecoderLayer"], **strategy_options}
    saver = {"dirpath": str(tmp_path), "filename": "{step}"}
    config = {
        "model": {
            "class_path": f"{here}.Language",
            "init_args": {
                "kind": "llama",
                "pretrained": str(pretrained / "llama"),
                **module_options,
            },
        },
        "data": {
            "class_path": "lightning_memmap.MemmapDataModule",
            "init_args": {
                "train_dataset": {"class_path": f"{here}.Sequences"},
                "store_dir": str(tmp_path / "stores"),
                "batch_size": GLOBAL_BATCH // 2,
            },
        },
        "trainer": {
            "accelerator": "cpu",
            "devices": 2,
            "strategy": {
                "class_path": "lightning_memmap.strategies.FSDP2Strategy",
                "init_args": wrapped,
            },
            "callbacks": [
                {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": saver}
            ],
            "max_epochs": 2,
            "limit_val_batches": 0,
            "accumulate_grad_batches": 2,
            "gradient_clip_val": 0.5,
            "logger": False,
            "enable_progress_bar": False,
        },
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    done = preloaded.run("-m", "lightning_memmap", "fit", "--config", path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-5000:]
    saved = torch.load(tmp_path / "step=6.ckpt", weights_only=True)["state_dict"]
    expected = one.state(name)
    if name == "adapters":
        expected = {key: value for key, value in expected.items() if "lora_" in key}
    assert_close(saved, expected, ATOL)


def test_modules_that_differ_between_ranks_raise(two: Runs) -> None:
    for rank in two.ranks:
        assert (
            "model.bert: evaluating on rank 0; training on rank 1" in rank["errors"]["Evaluating"]
        )
        assert "word_embeddings.weight: torch.float32" in rank["errors"]["Mixed"]
