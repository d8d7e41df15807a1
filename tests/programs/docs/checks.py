"""What the programs of the pages must do: checks of functions that they define."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import torch
from torch import Tensor

from lightning_memmap import MemmapDataModule
from lightning_memmap.loading import Packing, Padded
from lightning_memmap.transforms import RowRandom


def epoch_of(data: MemmapDataModule) -> list[Any]:
    """Return the training batches of an epoch."""
    data.prepare_data()
    data.setup("fit")
    return list(data.train_dataloader())


def num_rows(data: MemmapDataModule) -> int:
    """Return the number of training rows in an epoch."""
    return sum(len(batch["x"]) for batch in epoch_of(data))


def check_little_padding(data: MemmapDataModule, field: str) -> None:
    """Check that an epoch has all 480 rows of a field, and little padding."""
    batches = [batch[field] for batch in epoch_of(data)]
    assert sum(len(batch.lengths) for batch in batches) == 480
    num_items = sum(int(batch.lengths.sum()) for batch in batches)
    assert sum(batch.values.numel() for batch in batches) < 1.2 * num_items


def check_rows_differ(transform: Callable[..., dict[str, Tensor]]) -> None:
    """Check that a transform of images draws the numbers of each row, in any batch."""
    images = torch.arange(192.0).view(4, 3, 4, 4) / 192
    whole = transform({"image": images}, RowRandom(range(4)))["image"]
    part = transform({"image": images[1:3]}, RowRandom([1, 2]))["image"]
    torch.testing.assert_close(whole[1:3], part)
    assert whole.shape == images.shape


def check_mask_tokens(mask_tokens: Callable[..., dict[str, Tensor]], mask: int) -> None:
    """Check that tokens are masked where they have a label, and padding nowhere."""
    ids = torch.arange(40).view(4, 10)
    batch = {"ids": Padded(ids, torch.tensor([3, 10, 7, 1]))}
    masked = mask_tokens(batch, RowRandom(range(4)))
    assert masked["attention_mask"].sum() == 21
    assert ((masked["labels"] == ids) == (masked["input_ids"] == mask)).all()


def check_collate(transform: Any) -> None:
    """Check that a transform calls `old_collate` with the rows of a batch."""
    data = MemmapDataModule(
        [{"steps": torch.ones(1 + row % 7, 2), "label": row % 3} for row in range(96)],
        store_dir="stores/sequences",
        batch_size=8,
        layout={"steps": "list"},
        transform=transform,
    )
    steps, labels = epoch_of(data)[0]
    assert len(labels) == 8
    assert steps.batch_sizes[0] == 8


def make_llama() -> tuple[str, str]:
    """Save a small pretrained model; return its folder, and attention that a CPU can train."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=12_000,  # more than 1 million parameters in a layer
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained("folder")
    return "folder", "sdpa"


def check_fine_tuning(
    module: type[L.LightningModule], strategy: Any, data: MemmapDataModule, num_saved: int = 0
) -> None:
    """Check that a module trains on packs and exports, and which tensors its checkpoints have.

    Args:
        module: The class of the module.
        strategy: The strategy of the Trainer.
        data: Its packs.
        num_saved: The number of adapters, which alone are saved; 0 if all weights are.
    """
    trainer = L.Trainer(strategy=strategy, devices=1, precision="bf16-mixed", max_steps=2)
    # FlexAttention isn't trained on a CPU.
    with patch.object(Packing, "block_mask", Packing.attention_mask):
        trainer.fit(module(), data.with_options())
    trainer.save_checkpoint("last.ckpt")
    state = torch.load("last.ckpt", weights_only=True)["state_dict"]
    kinds = {value.dtype for value in state.values()}
    assert kinds == {torch.float32}
    assert all(value.any() for value in state.values())
    if num_saved:
        assert len(state) == num_saved
        assert all("lora_" in name for name in state)
    model: Any = module.load_from_checkpoint("last.ckpt").model
    model.save_pretrained("exported")
    assert Path("exported", "adapter_config.json" if num_saved else "config.json").exists()


def make_tokenizer() -> Any:
    """Make a tokenizer of bytes with a chat template, whose turns end with ``</s>``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(["</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="</s>",
        chat_template=(
            "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"
            "{% if add_generation_prompt %}[assistant]{% endif %}"
        ),
    )


def check_samples(chat: Callable[..., Any], pair: Callable[..., Any], tokenizer: Any) -> None:
    """Check that the targets are the answers and their ends, after `datasets.Dataset.map`."""
    import datasets

    turns = [("user", "a?"), ("assistant", "one"), ("user", "b?"), ("assistant", "two")]
    messages = [{"role": role, "content": content} for role, content in turns]
    chats = datasets.Dataset.from_list([{"messages": messages}])
    (sample,) = chats.map(chat, remove_columns=chats.column_names)
    targets = [label for label in sample["labels"] if label != -100]
    assert tokenizer.decode(targets) == "one</s>two</s>"
    assert sample["num_targets"] == len(targets)
    assert len(sample["tokens"]) == len(sample["labels"])
    pairs = datasets.Dataset.from_list([{"prompt": "a: ", "answer": "bc"}])
    (sample,) = pairs.map(pair, remove_columns=pairs.column_names)
    assert tokenizer.decode(sample["tokens"]) == "a: bc</s>"
    assert sample["labels"] == [-100] * 3 + sample["tokens"][3:]
    assert sample["num_targets"] == 3
