"""A packed batch gives the losses and gradients of the same documents unpacked."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_mask, flex_attention

from lightning_memmap.loading import Packing

LENGTH, VOCABULARY, HEADS, WIDTH = 48, 31, 4, 32
#: The lengths of the documents of each pack.
PACKS = [[7, 1, 20, 12], [48], [5, 5, 5], [30, 18]]
MAX_DOCUMENTS = 6

#: Attention of query, key and value, each (B, heads, L, E).
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def packing_of(packs: list[list[int]], length: int = LENGTH) -> Packing:
    starts = torch.zeros(len(packs), MAX_DOCUMENTS + 1, dtype=torch.int32)
    for pack, documents in enumerate(packs):
        starts[pack, 1 : len(documents) + 1] = torch.tensor(documents, dtype=torch.int32)
    return Packing.of(starts.cumsum(1, dtype=torch.int32), length, length)


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary position embeddings of (B, heads, L, E) at positions (B, L)."""
    half = x.shape[-1] // 2
    angles = positions[:, None, :, None] * 0.3 ** torch.arange(half, dtype=x.dtype)
    first, second = x.split(half, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Transformer(nn.Module):
    """Two layers with rotary positions and grouped queries."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        size = WIDTH // HEADS
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "q": nn.Linear(WIDTH, WIDTH),
                    "k": nn.Linear(WIDTH, 2 * size),
                    "v": nn.Linear(WIDTH, 2 * size),
                    "out": nn.Linear(WIDTH, WIDTH),
                }
            )
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = self.embed(tokens)
        batch, length, _ = x.shape

        def heads(values: Tensor) -> Tensor:
            return values.view(batch, length, -1, WIDTH // HEADS).transpose(1, 2)

        for layer in self.layers:
            assert isinstance(layer, nn.ModuleDict)
            query = rotated(heads(layer["q"](x)), positions)
            key = rotated(heads(layer["k"](x)), positions)
            value = heads(layer["v"](x))
            mixed = attend(query, key, value).transpose(1, 2).reshape(batch, length, WIDTH)
            x = x + layer["out"](torch.tanh(mixed))
        return self.head(x)


def tokens_and_labels() -> tuple[Tensor, Tensor]:
    """Random tokens, and labels whose prompts are masked."""
    torch.manual_seed(1)
    tokens = torch.randint(VOCABULARY, (len(PACKS), LENGTH))
    labels = tokens.masked_fill(torch.rand(tokens.shape) < 0.3, -100)
    return tokens, labels


def unpacked(model: Transformer) -> tuple[Tensor, list[list[Tensor]]]:
    """The mean loss over all targets, and the mean of each document, one document at a time."""
    tokens, labels = tokens_and_labels()

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    total, count = torch.zeros((), dtype=torch.float64), 0
    means = list[list[Tensor]]()
    for pack, documents in enumerate(PACKS):
        means.append([])
        start = 0
        for length in documents:
            here = slice(start, start + length)
            start += length
            logits = model(tokens[pack : pack + 1, here], torch.arange(length)[None], attend)
            targets = labels[pack, here][1:]
            loss = F.cross_entropy(logits[0, :-1], targets, reduction="sum")
            num_targets = int((targets != -100).sum())
            means[-1].append(
                loss.detach() / num_targets if num_targets else loss.detach() * torch.nan
            )
            total, count = total + loss, count + num_targets
    return total / count, means


def gradients(model: Transformer, loss: Tensor) -> list[Tensor]:
    return [*torch.autograd.grad(loss, [*model.parameters()])]


def packed_losses(model: Transformer, packing: Packing, attend: Attend) -> tuple[Tensor, Tensor]:
    """The loss at each place, and the targets."""
    tokens, labels = tokens_and_labels()
    targets = packing.targets(labels)
    logits = model(tokens, packing.position_ids, attend)
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view(targets.shape), targets


def test_packed_losses_and_gradients_are_those_of_single_documents() -> None:
    torch.manual_seed(0)
    model = Transformer().double()
    packing = packing_of(PACKS)
    losses, targets = packed_losses(model, packing, packing.attend)
    loss = losses.sum() / (targets != -100).sum()
    expected, means = unpacked(model)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    for found, right in zip(gradients(model, loss), gradients(model, expected), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-12)
    by_document = packing.document_means(losses.detach(), targets)
    for pack, documents in enumerate(means):
        torch.testing.assert_close(
            by_document[pack, : len(documents)], torch.stack(documents), equal_nan=True
        )
        assert by_document[pack, len(documents) :].isnan().all()


# On a CPU, FlexAttention has no backward pass: its losses are compared, and the mask by which a GPU
# computes gradients.
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("is_causal", [True, False])
def test_flex_attention_with_the_block_mask_is_that_of_single_documents(is_causal: bool) -> None:
    torch.manual_seed(0)
    model = Transformer()
    packing = packing_of(PACKS)
    block_mask = packing.block_mask(is_causal, block_size=16)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        found: Any = flex_attention(query, key, value, block_mask=block_mask, enable_gqa=True)
        return found

    with torch.no_grad():
        found, _ = packed_losses(model, packing, attend)
        expected, _ = packed_losses(model, packing, partial(packing.attend, is_causal=is_causal))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        if is_causal:
            losses, targets = packed_losses(model, packing, attend)
            single, _ = unpacked(model)
            mean = losses.sum() / (targets != -100).sum()
            torch.testing.assert_close(mean, single.float(), rtol=1e-5, atol=1e-6)
    dense = create_mask(block_mask.mask_mod, len(PACKS), 1, LENGTH, LENGTH, "cpu")
    assert torch.equal(dense, packing.attention_mask(is_causal))


def test_attention_across_documents_would_give_other_losses() -> None:
    torch.manual_seed(0)
    model = Transformer().double()
    packing = packing_of(PACKS)
    whole = packing_of([[LENGTH]] * len(PACKS))
    tokens, labels = tokens_and_labels()
    targets = packing.targets(labels).flatten()

    def loss(positions: Tensor, attend: Attend) -> Tensor:
        return F.cross_entropy(model(tokens, positions, attend).flatten(0, 1), targets)

    expected, _ = unpacked(model)
    assert abs(loss(packing.position_ids, whole.attend) - expected) > 1e-4
    # Rotary embeddings are relative: positions that go on shift all of a document alike.
    torch.testing.assert_close(loss(whole.position_ids, packing.attend), expected)


def test_varlen_arguments_name_each_document_and_all_padding() -> None:
    packing = packing_of(PACKS)
    arguments = packing.varlen_arguments()
    starts = arguments["cu_seq_q"]
    assert starts.dtype == torch.int32
    assert starts.shape == (len(PACKS) * (MAX_DOCUMENTS + 1) + 1,)
    lengths = [length for length in starts.diff().tolist() if length]
    assert lengths == [7, 1, 20, 12, 8, 48, 5, 5, 5, 33, 30, 18]
    assert max(lengths) <= arguments["max_q"] == arguments["max_k"] == LENGTH


def varlen_reference(query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor) -> Tensor:
    """What `varlen_attn` computes, sequence by sequence, of (B * L, heads, E) each."""
    parts = []
    for start, stop in pairwise(cu_seq_q.tolist()):
        q, k, v = (values[start:stop].transpose(0, 1)[None] for values in (query, key, value))
        if start < stop:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            parts.append(mixed[0].transpose(0, 1))
    return torch.cat(parts)


def test_losses_and_gradients_by_varlen_arguments_are_those_of_single_documents() -> None:
    torch.manual_seed(0)
    model = Transformer().double()
    packing = packing_of(PACKS)
    starts = packing.varlen_arguments()["cu_seq_q"]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        flat = [values.transpose(1, 2).flatten(0, 1) for values in (query, key, value)]
        mixed = varlen_reference(*flat, starts)
        return mixed.view(len(PACKS), LENGTH, HEADS, -1).transpose(1, 2)

    losses, targets = packed_losses(model, packing, attend)
    loss = losses.sum() / (targets != -100).sum()
    expected, _ = unpacked(model)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    for found, right in zip(gradients(model, loss), gradients(model, expected), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="varlen_attn has no kernel for the CPU")
def test_varlen_attention_is_that_of_documents() -> None:
    from torch.nn.attention.varlen import varlen_attn

    packing = packing_of([[70, 58], [128]], 128)
    moved = Packing.of(packing.cu_seqlens.cuda(), 128, 128)
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, HEADS, 128, 64, dtype=torch.bfloat16, device="cuda")

    def flat(values: Tensor) -> Tensor:
        return values.transpose(1, 2).flatten(0, 1).contiguous()

    found: Any = varlen_attn(
        flat(query), flat(key), flat(value), **moved.varlen_arguments(), window_size=(-1, 0)
    )
    expected = flat(moved.attend(query, key, value))
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_shapes_and_compiled_code_do_not_depend_on_the_documents() -> None:
    graphs = list[Any]()

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True)
    def places(starts: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        packing = Packing.of(starts, LENGTH, LENGTH)
        targets = packing.targets(packing.document_ids)
        return packing.position_ids, targets, packing.flat_cu_seqlens(), packing.attention_mask()

    for documents in ([7, 1, 20], [48], [5, 5, 5, 5, 5, 5]):
        packing = packing_of([documents] * 2)
        found = places(packing.cu_seqlens)
        assert torch.equal(found[0], packing.position_ids)
        assert torch.equal(found[3], packing.attention_mask())
        assert torch.equal(found[2], packing.flat_cu_seqlens())
    assert len(graphs) == 1
