"""The layout of a batch of packed documents: where each document is, and masks of attention."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


@dataclass(eq=False, repr=False)
class Packing:
    """The layout of the documents in each pack, under the key ``packing`` of a batch.

    Shapes don't depend on the documents, and nothing here waits for a device, so `torch.compile`
    and CUDA graphs need no second compilation.

    Args:
        cu_seqlens: The first token of each document of a pack, and then one past the last token of
            all documents, repeated up to the end: int32 of shape (B, max_documents + 1).
        document_ids: The document of each token, counted from 0 in each pack, and -1 for padding:
            int32 of shape (B, L).
        position_ids: The place of each token in its document, int64 of shape (B, L). A document
            that was cut counts from 0 in each pack. Padding counts from 0 too.
        target_mask: Whether the next token belongs to the same document, and so is a target: bool
            of shape (B, L). The last token of a document predicts nothing.
    """

    cu_seqlens: Tensor
    document_ids: Tensor
    position_ids: Tensor
    target_mask: Tensor

    #: The most tokens of any document of the dataset, for kernels that need a bound on the host.
    max_seqlen = 0

    @classmethod
    def of(cls, cu_seqlens: Tensor, length: int, max_seqlen: int) -> "Packing":
        """Make the packing from where documents start, int32 of shape (B, max_documents + 1)."""
        num_packs = len(cu_seqlens)
        tokens = torch.arange(length, dtype=torch.int32, device=cu_seqlens.device)
        tokens = tokens.expand(num_packs, length).contiguous()
        stops = cu_seqlens[:, 1:].contiguous()
        documents = torch.searchsorted(stops, tokens, right=True, out_int32=True)
        # Padding starts where the last document stops, at the last column.
        starts = cu_seqlens.gather(1, documents.long())
        is_padding = documents == stops.shape[1]
        stop = F.pad(stops, (0, 1), value=length).gather(1, documents.long())
        packing = cls(
            cu_seqlens,
            documents.masked_fill_(is_padding, -1),
            (tokens - starts).long(),
            (tokens + 1 < stop) & ~is_padding,
        )
        packing.max_seqlen = max_seqlen
        return packing

    @property
    def length(self) -> int:
        """Tokens of a pack, ``L``."""
        return self.document_ids.shape[1]

    def targets(self, labels: Tensor, ignore_index: int = -100) -> Tensor:
        """Return the label of the next token at each place.

        Args:
            labels: The tokens, or labels that are packed like them: integers of shape (B, L).
            ignore_index: Returned if the next token isn't a target.

        Returns:
            int64 of shape (B, L), for ``cross_entropy(logits.flatten(0, 1), targets.flatten())``.
        """
        following = F.pad(labels[:, 1:], (0, 1)).long()
        return following.masked_fill(~self.target_mask, ignore_index)

    def attention_mask(self, is_causal: bool = True) -> Tensor:
        """Return which token may attend to which: bool of shape (B, 1, L, L).

        Padding attends to padding, so that no row is empty.
        """
        ids = self.document_ids
        mask = ids[:, None, :, None] == ids[:, None, None, :]
        return mask.tril_() if is_causal else mask

    def attend(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool = True) -> Tensor:
        """Attend within documents by PyTorch's scaled dot product attention, on any device.

        It computes all pairs of a pack. FlexAttention with `block_mask`, or kernels with
        `varlen_arguments`, omit pairs of different documents.

        Args:
            query: (B, heads, L, E).
            key: (B, heads or fewer, L, E).
            value: Like ``key``.
            is_causal: Whether tokens attend to earlier ones only.

        Returns:
            A tensor like ``query``.
        """
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=self.attention_mask(is_causal),
            enable_gqa=key.shape[1] != query.shape[1],
        )

    def block_mask(self, is_causal: bool = True, block_size: int = 128) -> "BlockMask":
        """Return the mask for `torch.nn.attention.flex_attention`, alike for all heads.

        Build it once a step, and pass it to every layer.
        """
        # It imports a compiler.
        from torch.nn.attention.flex_attention import create_block_mask

        ids = self.document_ids

        def may_attend(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            is_same = ids[b, q] == ids[b, k]
            return is_same & (q >= k) if is_causal else is_same

        num_packs, length = ids.shape
        device = str(ids.device)
        return create_block_mask(
            may_attend, num_packs, None, length, length, device, BLOCK_SIZE=block_size
        )

    def flat_cu_seqlens(self) -> Tensor:
        """Return where sequences start if the batch is flattened to ``B * L`` tokens.

        Padding is a sequence too. Unused entries are sequences without a token.

        Returns:
            int32 of shape (B * (max_documents + 1) + 1,), ascending from 0 to ``B * L``.
        """
        num_packs = len(self.cu_seqlens)
        device = self.cu_seqlens.device
        starts = torch.arange(num_packs + 1, dtype=torch.int32, device=device) * self.length
        flat = (self.cu_seqlens + starts[:-1, None]).flatten()
        return torch.cat([flat, starts[-1:]])

    def varlen_arguments(self) -> dict[str, Any]:
        """Return the arguments ``cu_seq_q``, ``cu_seq_k``, ``max_q`` and ``max_k``.

        They are for `torch.nn.attention.varlen.varlen_attn`, which needs a GPU, and queries of
        shape (B * L, heads, E).
        """
        cu_seqlens = self.flat_cu_seqlens()
        # Padding is a sequence too.
        longest = self.length
        return {"cu_seq_q": cu_seqlens, "cu_seq_k": cu_seqlens, "max_q": longest, "max_k": longest}

    def document_sums(self, values: Tensor) -> Tensor:
        """Add up the values of the tokens of each document.

        Args:
            values: (B, L).

        Returns:
            A tensor of shape (B, max_documents), 0 in unused columns.
        """
        num_packs, num_starts = self.cu_seqlens.shape
        # Padding is added to the last column.
        index = self.document_ids.long() % num_starts
        sums = values.new_zeros(num_packs, num_starts).scatter_add_(1, index, values)
        return sums[:, :-1]

    def document_means(self, losses: Tensor, targets: Tensor, ignore_index: int = -100) -> Tensor:
        """Return the mean loss of each document over its targets.

        Args:
            losses: The loss at each place, of shape (B, L).
            targets: The targets of `targets`, of shape (B, L).
            ignore_index: The value of ``targets`` where there is none.

        Returns:
            A tensor of shape (B, max_documents), NaN for documents without a target.
        """
        is_target = (targets != ignore_index).to(losses.dtype)
        return self.document_sums(losses * is_target) / self.document_sums(is_target)
