"""Fine-tune a Llama of Hugging Face's transformers on packed documents.

    pip install transformers peft
    python examples/packed.py --devices 8 --lora_rank 16 --precision bf16-mixed
    python examples/packed.py --devices 8 --strategy memmap_fsdp2 --precision bf16-mixed

The first command trains LoRA adapters, with the whole model on each GPU; the second one all
weights, sharded by FSDP2. Prompts are masked, documents attend to themselves only, and the loss is
the mean over all answers of an optimizer step, whatever the number of processes. Without
``--pretrained NAME`` the model is small and begins from a config: nothing is downloaded. A run that
was interrupted continues inside its epoch with ``--ckpt_path checkpoints/packed/last.ckpt``. The
texts, 750 KB about Python, come with Python itself (PSF licence).
"""

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from jsonargparse import auto_cli
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from examples.data.paragraphs import IGNORED, Paragraphs
from lightning_memmap import MemmapDataModule
from lightning_memmap.sampling import Packed
from lightning_memmap.schema import Pad
from lightning_memmap.strategies import FSDP2Strategy


class FineTuning(L.LightningModule):
    """A causal language model on packed documents.

    Args:
        lr: Learning rate of AdamW.
        hidden: Width of the model.
        layers: Number of layers.
        pretrained: Name or folder of a pretrained model, instead of a small one. Its tokens must be
            those of the dataset.
        lora_rank: Rank of the LoRA adapters, which alone are trained and saved; 0 trains all.
        checkpointing: Compute activations again in the backward pass, to save memory.
    """

    def __init__(
        self,
        lr: float = 2e-3,
        hidden: int = 64,
        layers: int = 2,
        pretrained: str | None = None,
        lora_rank: int = 0,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.hidden = hidden
        self.layers = layers
        self.pretrained = pretrained
        self.lora_rank = lora_rank
        self.checkpointing = checkpointing
        # Checkpoints of adapters lack the frozen weights.
        self.strict_loading = lora_rank == 0
        # FlexAttention omits pairs of different documents. On a CPU it can't be trained.
        self.attention = "flex_attention" if torch.cuda.is_available() else "sdpa"
        self.model: Any = None

    def configure_model(self) -> None:
        """Build the model. Under FSDP2, rank 0 sends its weights to all others."""
        if self.model is not None:
            return
        models: Any = AutoModelForCausalLM
        is_received = self.global_rank > 0 and isinstance(self.trainer.strategy, FSDP2Strategy)
        dtype = torch.bfloat16 if self.lora_rank else torch.float32
        options = {"attn_implementation": self.attention, "dtype": dtype}
        if self.pretrained is not None and not is_received:
            model = models.from_pretrained(self.pretrained, **options)
        else:
            with torch.device("meta" if is_received else "cpu"):
                model = models.from_config(self.config(), **options)
        if self.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if self.lora_rank:
            from peft import LoraConfig, get_peft_model

            adapted = ["q_proj", "k_proj", "v_proj", "o_proj"]
            lora = LoraConfig(r=self.lora_rank, target_modules=adapted, task_type="CAUSAL_LM")
            model = get_peft_model(model, lora)
        # from_pretrained() returns a model in evaluation mode.
        self.model = model.train()

    def config(self) -> Any:
        """Return the config of the pretrained model, or of a small one."""
        if self.pretrained is not None:
            return AutoConfig.from_pretrained(self.pretrained)
        return LlamaConfig(
            vocab_size=256,
            hidden_size=self.hidden,
            intermediate_size=2 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
        )

    def losses(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the loss of each token and its target, of shape (B, L) each."""
        packing = batch["packing"]
        tokens = batch["tokens"].long()
        is_flexible = self.attention == "flex_attention"
        mask = packing.block_mask() if is_flexible else packing.attention_mask()
        places = {"attention_mask": mask, "position_ids": packing.position_ids}
        output = self.model(tokens, **places, use_cache=False)
        targets = packing.targets(batch["labels"], IGNORED)
        losses = F.cross_entropy(
            output.logits.flatten(0, 1).float(),
            targets.flatten(),
            ignore_index=IGNORED,
            reduction="none",
        )
        return losses.view(targets.shape), targets

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Return the mean loss over the targets of this process, which the strategy weights."""
        losses, targets = self.losses(batch)
        return losses.sum() / (targets != IGNORED).sum().clamp(min=1)

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Log ``val_loss``, the mean over tokens, and ``val_document_loss``, over documents."""
        losses, targets = self.losses(batch)
        num_targets = int((targets != IGNORED).sum())
        how: dict[str, Any] = {"on_epoch": True, "sync_dist": True}
        self.log("val_loss", losses.sum() / max(1, num_targets), batch_size=num_targets, **how)
        by_document = batch["packing"].document_means(losses, targets, IGNORED)
        by_document = by_document[~by_document.isnan()]
        mean = by_document.mean()
        self.log("val_document_loss", mean, batch_size=len(by_document), **how)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Remove the frozen weights, which are loaded by name."""
        if self.lora_rank:
            named = self.named_parameters(remove_duplicate=False)
            for name in [name for name, param in named if not param.requires_grad]:
                checkpoint["state_dict"].pop(name, None)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW of the parameters that are trained."""
        trained = [param for param in self.parameters() if param.requires_grad]
        return torch.optim.AdamW(trained, lr=self.lr, weight_decay=0.01)


def main(
    devices: int = 1,
    strategy: str = "memmap_superbatch_ddp",
    store_dir: str = "stores/packed",
    length: int = 1024,
    packs: int = 8,
    accumulate: int = 2,
    max_steps: int = 60,
    pretrained: str | None = None,
    lora_rank: int = 0,
    lr: float = 2e-3,
    checkpointing: bool = False,
    precision: Any = "32-true",
    save_every: int = 20,
    ckpt_path: str | None = None,
) -> None:
    """Fine-tune, validate, and print the losses and what packing leaves unused.

    Args:
        devices: Processes, each on its own GPU, or on the CPU.
        strategy: ``memmap_fsdp2`` shards a model that is too large for one GPU.
        store_dir: Directory of the stores.
        length: Tokens of a pack.
        packs: Packs of a micro-batch over all processes.
        accumulate: Micro-batches of an optimizer step.
        max_steps: The most optimizer steps.
        pretrained: Name or folder of a pretrained model.
        lora_rank: Rank of the LoRA adapters; 0 trains all weights.
        lr: Learning rate, for a new small model by default.
        checkpointing: Compute activations again in the backward pass.
        precision: ``bf16-mixed`` on GPUs.
        save_every: Optimizer steps from one checkpoint to the next.
        ckpt_path: A checkpoint of an interrupted run.
    """
    L.seed_everything(0)
    data = MemmapDataModule(
        Paragraphs("train"),
        Paragraphs("val"),
        store_dir=store_dir,
        batch_size=packs // devices,
        sampler=Packed("tokens", length),
        weight="num_targets",
        layout={"labels": Pad(value=IGNORED)},
    )
    trainer = L.Trainer(
        strategy=strategy,
        devices=devices,
        accumulate_grad_batches=accumulate,
        max_steps=max_steps,
        num_sanity_val_steps=0,
        logger=False,
        precision=precision,
        callbacks=[
            ModelCheckpoint("checkpoints/packed", every_n_train_steps=save_every, save_last=True)
        ],
        enable_model_summary=False,
    )
    model = FineTuning(lr, pretrained=pretrained, lora_rank=lora_rank, checkpointing=checkpointing)
    trainer.fit(model, datamodule=data, ckpt_path=ckpt_path)
    order: Any = data.order
    losses = trainer.validate(model, datamodule=data, verbose=False)[0]
    if trainer.is_global_zero:
        print(f"{order.num_positions} packs, {order.padding_fraction:.1%} of them padding")
        for name, value in losses.items():
            print(f"{name} {value:.6f}")


if __name__ == "__main__":
    auto_cli(main)
