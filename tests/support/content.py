"""Content of tensors for tests: random bits, comparing them, and seeing what temporaries an op makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def noise(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Random bits: payloads of NaNs, negative zeros and denormals, too."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=generator).bool()
    size = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape, size), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(tuple(shape))


def on_gpu(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """The same bits on the GPU."""
    return noise(shape, dtype, seed).cuda()


def pinned(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """The same bits in memory that a GPU reaches."""
    return noise(shape, dtype, seed).pin_memory()


def bits(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


class Made(TorchDispatchMode):
    """The bytes of every tensor that an op makes; views and what it was given do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}
        out = func(*args, **(kwargs or {}))
        for found in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(found, Tensor) and found.untyped_storage().data_ptr() not in given:
                self.sizes.append(found.untyped_storage().nbytes())
        return out
