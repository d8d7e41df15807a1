"""Groups of tensors that are sent together."""

from collections.abc import Sequence

from torch import Tensor


def buckets(tensors: Sequence[Tensor], max_bytes: int) -> list[slice]:
    """Group consecutive tensors of one dtype, so that each group is sent at once.

    Args:
        tensors: The tensors, in the order of the groups.
        max_bytes: Maximum bytes of a group with more than one tensor.

    Returns:
        The slice of the tensors of each group.
    """
    starts, num_bytes = [0], 0
    for index, tensor in enumerate(tensors):
        is_other = tensor.dtype != tensors[starts[-1]].dtype
        if index > starts[-1] and (is_other or num_bytes + tensor.nbytes > max_bytes):
            starts.append(index)
            num_bytes = 0
        num_bytes += tensor.nbytes
    ends = [*starts[1:], len(tensors)]
    return [slice(start, end) for start, end in zip(starts, ends, strict=True) if end > start]
