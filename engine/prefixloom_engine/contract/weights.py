"""Watched weights: a digest of a model's tensors, made once, and a cheap look at whether they are still the same.

A tensor that was changed in place has another version, and one that was put in its place another address. A change
through ``Tensor.data`` or a view of numpy's moves neither, so a few bytes of each tensor on a CPU are compared as well:
all of them for a request, and for a pass a part of them, since each is read from memory that no processor's cache has.
Such a change that leaves all of these as they are is not noticed.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from prefixloom import CompositionError

Named = tuple[str, Tensor]
Stamp = tuple[int, int, int]

SAMPLE = 64
"""About how many bytes of each tensor are compared."""
PARTS = 7
"""Into how many parts these bytes are divided. ``seem_same`` compares one part, and the next one when called again. An
odd number, so that each part has bytes of every place in a number: its sign is in one of them."""
LARGE = 1 << 20
"""Bytes from which on a tensor is hashed on a thread of its own."""


class WatchedWeights:
    """The tensors of one model. ``tensors`` lists all that decide its outputs, by names that last."""

    def __init__(self, tensors: Callable[[], Iterable[Named]]) -> None:
        self._tensors = tensors
        self._stamps: list[Stamp] = []
        self._samples: list[memoryview] = []
        self._sampled: list[bytes] = []
        self._parts: list[tuple[list[memoryview], list[bytes]]] = []
        self._digests: dict[str, tuple[Stamp, bytes, bytes]] = {}

    def same(self) -> bool:
        """Whether versions, addresses and the bytes that are compared are those of the last ``digests``."""
        if not self._stamps or [stamp(tensor) for _, tensor in self._tensors()] != self._stamps:
            return False
        return [each.tobytes() for each in self._samples] == self._sampled

    def seem_same(self) -> bool:
        """As ``same``, but of the bytes that are compared, only a part is looked at, in turn."""
        if not self._stamps or [stamp(tensor) for _, tensor in self._tensors()] != self._stamps:
            return False
        self._parts.append(self._parts.pop(0))
        views, sampled = self._parts[0]
        return [each.tobytes() for each in views] == sampled

    def digests(self) -> dict[str, bytes]:
        """By name, the digest of each tensor. Those that may have changed are hashed again."""
        found = list(self._tensors())
        stamps = [stamp(tensor) for _, tensor in found]
        if stamps != self._stamps:
            self._stamps = stamps
            self._samples = [sample(tensor) for _, tensor in found]
        sampled = self._sampled = [each.tobytes() for each in self._samples]
        self._parts = [
            ([each[part::PARTS] for each in self._samples], [each[part::PARTS] for each in sampled])
            for part in range(PARTS)
        ]
        lacking: list[Named] = []
        for (name, tensor), mark, seen in zip(found, stamps, sampled, strict=True):
            if self._digests.get(name, ((), b"", b""))[:2] != (mark, seen):
                lacking.append((name, tensor))
        made = dict(zip((name for name, _ in lacking), _hashed([tensor for _, tensor in lacking]), strict=True))
        self._digests = {
            name: (mark, seen, made.get(name) or self._digests[name][2])
            for (name, _), mark, seen in zip(found, stamps, sampled, strict=True)
        }
        return {name: digest for name, (_, _, digest) in self._digests.items()}


def stamp(tensor: Tensor) -> Stamp:
    """What a change of ``tensor`` changes, without a look at its content."""
    version = 0 if tensor.is_inference() else tensor._version
    return id(tensor), tensor.data_ptr(), version


def sample(tensor: Tensor) -> memoryview:
    """A view of some bytes of ``tensor``, spread over all of it; of none where reading them would wait for a device."""
    if tensor.device.type != "cpu" or not tensor.data_ptr() or not tensor.is_contiguous():
        return memoryview(b"")
    size = tensor.numel() * tensor.element_size()
    return _memory(tensor, size)[:: size // SAMPLE | 1]


def _memory(tensor: Tensor, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr() if size else 0)).cast("B")


def _hashed(tensors: list[Tensor]) -> list[bytes]:
    large = sum(tensor.numel() * tensor.element_size() > LARGE for tensor in tensors)
    if large < 2:
        return [digest_of(tensor) for tensor in tensors]
    with ThreadPoolExecutor(min(large, torch.get_num_threads())) as threads:
        return list(threads.map(digest_of, tensors))


def digest_of(tensor: Tensor) -> bytes:
    """A digest of a tensor's dtype, shape and bytes; of a tensor that is made of others, of these."""
    hashed = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16, person=b"loom.weights")
    if tensor.device.type == "meta":
        raise CompositionError(
            "some weights are on the meta device, which keeps no content (they may be offloaded), so nobody can tell "
            "what a hit depends on: load the whole model onto one device"
        )
    if is_traceable_wrapper_subclass(tensor):
        names, more = tensor.__tensor_flatten__()
        hashed.update(combined((name, digest_of(getattr(tensor, name))) for name in names).encode())
        hashed.update(repr(more).encode())
    elif tensor.numel():
        here = tensor.detach().contiguous().cpu()
        size = here.numel() * here.element_size()
        hashed.update(_memory(here, size))
    return hashed.digest()


def combined(digests: Iterable[tuple[str, bytes]]) -> str:
    """One digest of several tensors, whatever their order."""
    hashed = hashlib.blake2b(digest_size=16, person=b"loom.weights")
    for name, digest in sorted(digests):
        hashed.update(f"{len(name)} {name}".encode() + digest)
    return hashed.hexdigest()
