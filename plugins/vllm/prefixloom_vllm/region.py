"""Region: the shared memory that the scheduler and the workers of one engine map.

It begins with a table of what is finished: a worker writes the number of each copy when it is over, and the scheduler
reads it whenever it likes, without a message. Behind that lie the slots, rank by rank. A slot takes a block of any
group: the layers of the group lie in it one behind the other.

The file's name is gone as soon as everybody has mapped it, so the memory goes with the last process, however it ends.
What a process leaves that dies before that is removed by the next one that starts.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import torch

from prefixloom import CompositionError, StorageError

from .groups import Group, slot_bytes

PREFIX = "prefixloom-vllm-"
ALIGNMENT = 4096

RING = 4096
"""The most copies that may be under way at once: the table has a place for each, by its number."""

MAPPED, COPIES = 0, 1
"""The first words of a rank's row: whether it has mapped the region; then the copies that are over."""


class Region:
    """One mapping of the shared memory. ``rank`` is None in the scheduler's process."""

    def __init__(
        self, folder: str, engine: str, groups: Sequence[Group], slots: int, ranks: int, rank: int | None
    ) -> None:
        self.rank = rank
        self.ranks = ranks
        self._slots = slots
        self._slot_bytes = slot_bytes(groups)
        self._groups = {group.index: group for group in groups}
        rows = ranks + 1  # the last is the scheduler's
        self._begins = [_aligned(rows * (COPIES + RING) * 8)]  # of each rank's slots, and of what lies behind them
        for _ in range(ranks):
            self._begins.append(_aligned(self._begins[-1] + slots * self._slot_bytes))
        self.size = self._begins[-1]
        self.path = Path(folder, f"{PREFIX}{os.getuid()}-{re.sub('[^A-Za-z0-9_.-]', '_', engine)}")
        self._file = _opened(self.path, self.size)
        try:
            self._map = mmap.mmap(self._file, self.size)
            view = memoryview(self._map)
            self._slots_of = [
                torch.frombuffer(view[begin:end], dtype=torch.uint8) for begin, end in pairwise(self._begins)
            ]
            """By rank, the bytes of its slots. Empty once the region is closed."""
            self._row = COPIES + RING
            self._table = memoryview(self._map)[: rows * self._row * 8].cast("q")
            self._named = True
            mine = (ranks if rank is None else rank) * self._row + MAPPED
            if self._table[mine]:
                raise StorageError(
                    f"another engine on this machine has the engine_id {engine!r}: give each its own, or none"
                )
            self._table[mine] = 1
            self._locked = 0
        except BaseException:
            os.close(self._file)
            raise
        self.unlink_when_mapped()

    def unlink_when_mapped(self) -> None:
        """Remove the name once all processes have the memory."""
        if self._named and all(self._table[MAPPED :: self._row]):
            self.path.unlink(missing_ok=True)
            self._named = False

    # ------------------------------------------------------------ slots
    def layers(self, group: int, rank: int) -> Iterator[torch.Tensor]:
        """Yield for each layer of a group the (slots, bytes) of one rank."""
        start = 0
        for size in self._groups[group].layer_bytes:
            yield self._slots_of[rank].as_strided((self._slots, size), (self._slot_bytes, 1), start)
            start += size

    def tensors(self) -> dict[str, dict[str, list[torch.Tensor]]]:
        """Return the slots of all ranks, as ``compose(tensors=...)`` takes them."""
        found: dict[str, dict[str, list[torch.Tensor]]] = {}
        for group in self._groups.values():
            mine = found.setdefault(group.name, {})
            for rank in range(self.ranks):
                for size, layer in zip(group.layer_bytes, self.layers(group.index, rank), strict=True):
                    mine.setdefault(f"rank{rank}_{size}", []).append(layer if group.is_state else layer[:, None])
        return found

    def page_lock(self) -> None:
        """Lock this rank's slots in the host's memory, so that a CUDA device can copy from and to them by itself."""
        assert self.rank is not None
        mine = self._slots_of[self.rank]
        address, size = mine.data_ptr(), mine.numel()
        error = int(torch.cuda.cudart().cudaHostRegister(address, size, 0))  # type: ignore[no-untyped-call]
        if error:
            raise CompositionError(
                f"{size / 2**30:.2f} GiB of {self.path.parent} cannot be page-locked (CUDA error {error}): give the "
                f"connector less memory, or by 'shm' a folder that lies in memory"
            )
        self._locked = address

    def page_unlock(self) -> None:
        if self._locked:
            torch.cuda.cudart().cudaHostUnregister(self._locked)  # type: ignore[no-untyped-call]
            self._locked = 0

    # ------------------------------------------------------------ copies that are over
    def finish(self, number: int, ok: bool) -> None:
        """Tell the scheduler that a copy of this rank is over. What the copy wrote is in memory by now."""
        assert self.rank is not None
        self._table[self.rank * self._row + COPIES + number % RING] = number if ok else -number

    def finished(self, number: int) -> bool | None:
        """Return whether a copy succeeded on all ranks; None: some rank has not finished it."""
        well = True
        for rank in range(self.ranks):
            told = self._table[rank * self._row + COPIES + number % RING]
            if told == -number:
                well = False
            elif told != number:
                return None
        return well

    def mine(self, number: int) -> bool:
        """Return whether this rank's copy of this number is over and succeeded."""
        assert self.rank is not None
        return self._table[self.rank * self._row + COPIES + number % RING] == number

    def close(self) -> None:
        """Free the memory. Views of it keep it until they are gone, too."""
        if not self._slots_of:
            return
        self.path.unlink(missing_ok=True)
        self.page_unlock()
        self._slots_of.clear()
        self._table.release()
        with contextlib.suppress(BufferError):
            self._map.close()
        os.close(self._file)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _opened(path: Path, size: int) -> int:
    """Open the file of this size, make it if need be, and lock it, so that later processes know that it is in use."""
    if not path.parent.is_dir():
        raise StorageError(f"there is no folder {path.parent} for the shared memory: say another by 'shm'")
    _sweep(path)
    while True:
        file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_SH)
            state = os.fstat(file)
            if not state.st_nlink:  # somebody swept it between these two calls
                os.close(file)
                continue
            if state.st_size not in (0, size):
                raise CompositionError(
                    f"the shared memory {path} has {state.st_size} bytes, and this process expects {size}: scheduler "
                    f"and workers disagree about the model or the options"
                )
            _reserve(file, path, size)
            return file
        except BaseException:
            os.close(file)
            raise


def _reserve(file: int, path: Path, size: int) -> None:
    """Give the file its memory now. A page that cannot be had later would end the process by a signal."""
    state = os.statvfs(path.parent)
    lacking = size - os.fstat(file).st_blocks * 512
    try:
        if lacking > state.f_bavail * state.f_frsize:
            raise OSError("too little room")
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise StorageError(
            f"{path.parent} has no room for {size / 2**30:.2f} GiB of shared memory ({error}): give the connector less "
            f"memory, make the folder larger (docker: --shm-size), or say another folder by 'shm'"
        ) from error


def _sweep(own: Path) -> None:
    """Remove the memory that engines of this user left when they ended."""
    for path in own.parent.glob(f"{PREFIX}{os.getuid()}-*"):
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(file)
