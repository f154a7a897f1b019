"""Watched weights: a digest of a model's tensors, made once, and a cheap look at whether they are still the same.

A tensor that was changed in place has another version, and one that was put in its place another address. A change
through ``Tensor.data`` or a view of numpy's moves neither, so a sample of each tensor is compared as well: the whole
sample for a request, on any device, and for a pass a part of it, where reading it waits for no device. Such a change
that leaves the sample as it is is not noticed: ``forget`` is for who knows of it.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from prefixloom import CompositionError

Named = tuple[str, Tensor]
Stamp = tuple[int, ...]
PLAIN = (Tensor, Parameter)

SAMPLE = 64
"""About how many numbers of each tensor are compared."""
PARTS = 8
"""Into how many parts a sample is divided. ``seem_same`` compares one part, and the next one when called again."""
LARGE = 1 << 20
"""Bytes from which on a tensor is hashed on a thread of its own."""


class WatchedWeights:
    """The tensors of one model. ``tensors`` lists all that decide its outputs, by names that last."""

    def __init__(self, tensors: Callable[[], Iterable[Named]]) -> None:
        self._tensors = tensors
        self._stamps: list[Stamp] = []
        self._near: list[Tensor] = []
        """The samples that wait for no device. They hold the memory of their tensors, so they end with the stamps."""
        self._far = False
        self._sampled = b""
        self._parts: list[tuple[list[Tensor], bytes]] = []
        self._part = 0
        self._digests: dict[str, tuple[Stamp, bytes, bytes]] = {}

    def same(self) -> bool:
        """Return whether versions, addresses and samples are those of the last ``digests``."""
        return self._unmoved() and self._sample() == self._sampled

    def seem_same(self) -> bool:
        """Compare as ``same`` does, but one part of the samples, in turn, and none of a device that it waits for."""
        if not self._unmoved():
            return False
        self._part = (self._part + 1) % PARTS
        views, before = self._parts[self._part]
        return sampled(views) == before

    def written(self) -> bool:
        """Return whether a sample has changed though versions and addresses are those of the last ``digests``."""
        return self._unmoved() and self._sample() != self._sampled

    def _unmoved(self) -> bool:
        if self._stamps and [stamp(tensor) for _, tensor in self._tensors()] == self._stamps:
            return True
        self._stamps, self._near, self._parts = [], [], []
        return False

    def _sample(self) -> bytes:
        if not self._far:
            return sampled(self._near)
        far = [sample(part) for _, tensor in self._tensors() for part in parts_of(tensor) if waits(part)]
        return sampled(self._near) + sampled(far)

    def forget(self) -> None:
        """Hash every tensor again when the digests are next asked for."""
        self._stamps, self._digests = [], {}

    def digests(self) -> dict[str, bytes]:
        """Return the digest of each tensor by name, and hash the tensors again that may have changed.

        If a sample has changed, but no version or address, hash all: others may have changed where no sample is.
        """
        found = list(self._tensors())
        self._stamps = [stamp(tensor) for _, tensor in found]
        self._near = [sample(part) for _, tensor in found for part in parts_of(tensor) if not waits(part)]
        self._far = any(waits(part) for _, tensor in found for part in parts_of(tensor))
        self._sampled = self._sample()
        parts = [[view[part::PARTS] for view in self._near] for part in range(PARTS)]
        self._parts = [(part, sampled(part)) for part in parts]
        known = self._digests
        marks = {
            name: (mark, sampled(map(sample, parts_of(tensor))))
            for (name, tensor), mark in zip(found, self._stamps, strict=True)
        }
        if any(
            mark == known[name][0] and seen != known[name][1] for name, (mark, seen) in marks.items() if name in known
        ):
            known = {}
        lacking = [(name, tensor) for name, tensor in found if name not in known or known[name][:2] != marks[name]]
        made = dict(zip((name for name, _ in lacking), _hashed([tensor for _, tensor in lacking]), strict=True))
        self._digests = {name: (*mark, made.get(name) or known[name][2]) for name, mark in marks.items()}
        return {name: digest for name, (_, _, digest) in self._digests.items()}


def stamp(tensor: Tensor) -> Stamp:
    """Return numbers that change when ``tensor``, or a tensor of which it is made, does. Its content is not read."""
    own = id(tensor), tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version
    if type(tensor) in PLAIN:
        return own
    return own + tuple(number for part in parts_of(tensor)[1:] for number in stamp(part))


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Return a tensor, and the tensors of which it is made."""
    if type(tensor) in PLAIN or not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    return [tensor, *(part for name in tensor.__tensor_flatten__()[0] for part in parts_of(getattr(tensor, name)))]


def sample(tensor: Tensor) -> Tensor:
    """Return a view of numbers spread over all of ``tensor``; of none where its memory has gaps or no content."""
    size, dense = tensor.numel(), 1
    for stride, count in () if tensor.is_contiguous() else sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if count > 1:
            dense = dense * count if stride == dense else -1
    if dense < 0 or not tensor.data_ptr():
        return torch.empty(0, device="cpu")
    step = size // SAMPLE | 1
    return tensor.detach().as_strided((-(-size // step),), (step,))


def waits(tensor: Tensor) -> bool:
    """Return whether reading a tensor waits for a device."""
    return tensor.device.type != "cpu"


def sampled(views: Iterable[Tensor]) -> bytes:
    """Return the content of some samples. Join them where they are, so that one copy brings all from a device."""
    together: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for view in views:
        together.setdefault((view.device, view.dtype), []).append(view)
    joined = [torch.cat(each) for each in together.values()]
    gathered = [(each.cpu() if waits(each) else each).view(torch.uint8) for each in joined]
    return b"".join(_memory(each, each.numel()).tobytes() for each in gathered)  # without numpy, too


def _memory(tensor: Tensor, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr() if size else 0)).cast("B")


def _hashed(tensors: list[Tensor]) -> list[bytes]:
    large = sum(tensor.numel() * tensor.element_size() > LARGE for tensor in tensors)
    if large < 2:
        return [digest_of(tensor) for tensor in tensors]
    with ThreadPoolExecutor(min(large, torch.get_num_threads())) as threads:
        return list(threads.map(digest_of, tensors))


def digest_of(tensor: Tensor) -> bytes:
    """Digest a tensor's dtype, shape and bytes; of a tensor that is made of others, these."""
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
    """Combine the digests of several tensors, whatever their order."""
    hashed = hashlib.blake2b(digest_size=16, person=b"loom.weights")
    for name, digest in sorted(digests):
        hashed.update(f"{len(name)} {name}".encode() + digest)
    return hashed.hexdigest()
