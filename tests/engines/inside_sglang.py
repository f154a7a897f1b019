"""A pytest plugin for SGLang's own tests: its caches get our class in their place.

The tests make a cache, hand in tokens and slots (``insert``), match, lock and evict. ``insert`` is not among the calls
of SGLang's scheduler, so it stands here, over the same books. A test that looks into SGLang's tree, or needs a flag
that our adapter refuses when SGLang starts, is not applicable: it is skipped at that place, with the name it used.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import forward_sglang
import pytest
import torch
from sglang.srt.mem_cache import radix_cache, unified_radix_cache
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache, InsertParams, InsertResult
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeNode

from prefixloom import encode
from prefixloom_sglang import cache as adapter
from prefixloom_sglang.composition import FULL, STATE, Pools, books_for, pools_of
from prefixloom_sglang.prefix import Prefix
from prefixloom_sglang.slots import Back, Handed, Pages, TokenSlots, pages_of

MADE = 0
"""How many of our caches were made so far."""
KINDS = {
    ComponentType.FULL: "full_attention",
    ComponentType.SWA: "sliding_attention",
    ComponentType.MAMBA: "linear_attention",
}
LAYERS = {
    "num_attention_heads": 1, "num_key_value_heads": 1, "hidden_size": 16, "head_dim": 16, "dtype": "float32",
    "linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
MADE_UP = 1 << 24
"""So many tokens has a cache without pools."""
REFUSED = {
    "disable": "without a prefix cache SGLang's own class is used",
    "enable_session_radix_cache": "--enable-session-radix-cache is refused",
    "component_registry_override": "SGLang's components are replaced",
    "eviction_policy_config": "--radix-eviction-policy-config is refused",
    "decoder_swa_bounded_replay": "--enable-decoder-swa-bounded-replay is refused",
}
OF_ITS_NODES = {"children", "parent", "value", "component_data"}


def not_applicable(reason: str) -> None:
    pytest.skip(f"not applicable: {reason}")


def fields(cls: type) -> set[str]:
    """Return all names that objects of a class have."""
    return {*dir(cls), *re.findall(r"self\.(\w+)", inspect.getsource(cls))}


class Node(Prefix):
    """What our cache returns where SGLang's returns a node, or a node's number."""

    __slots__ = ()
    of_its_nodes: ClassVar[set[str]] = OF_ITS_NODES | fields(UnifiedTreeNode) | fields(radix_cache.TreeNode)

    @property
    def id(self) -> Prefix:
        return self

    @property
    def key(self) -> bytes:
        not_applicable("reads node.key")
        return b""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Node) and Prefix.key.__get__(self) == Prefix.key.__get__(other)

    def __hash__(self) -> int:
        return hash(Prefix.key.__get__(self))

    def __getattr__(self, name: str) -> Any:
        if name in self.of_its_nodes:
            not_applicable(f"reads node.{name}")
        raise AttributeError(name)


class Instead(type(BasePrefixCache)):  # type: ignore[misc]
    """The class of our classes: a test may look up what belongs to SGLang's class itself."""

    def __getattr__(cls, name: str) -> Any:
        if name in OurTree.of_its_tree:
            not_applicable(f"calls {name} of SGLang's class")
        raise AttributeError(name)


class OurTree(adapter.PrefixloomCache, metaclass=Instead):
    """Our cache where a test makes SGLang's one."""

    of_its_tree: ClassVar[set[str]] = set()

    def __init__(self, params: Any) -> None:
        global MADE
        MADE += 1
        for name, reason in REFUSED.items():
            if getattr(params, name, None):
                not_applicable(reason)
        pool = getattr(params.req_to_token_pool, "mamba_pool", None)
        if getattr(pool, "enable_int8_checkpoint", False) or getattr(params, "enable_int8_mamba_checkpoint", False):
            not_applicable("int8 checkpoints of states are refused")
        super().__init__(params, self._books(params))
        allocator = params.token_to_kv_pool_allocator
        if self.page_size != getattr(allocator, "page_size", self.page_size):
            self.slots = MadeUpSlots(allocator, self.page_size, allocator.size_full)

    def _books(self, params: Any) -> Any:
        kinds = tuple(params.tree_components)
        config = {
            "model_type": "qwen3_next", "num_hidden_layers": len(kinds), "layer_types": [KINDS[each] for each in kinds],
            "sliding_window": (params.sliding_window_size or 0) + 1, **LAYERS,
        }  # fmt: skip
        pools = pools_of(params, ComponentType.SWA in kinds, ComponentType.MAMBA in kinds)
        return books_for(config, pools, bigrams=params.is_eagle, policy=params.eviction_policy.lower())

    def insert(self, params: InsertParams) -> InsertResult:
        key = params.key
        assert key is not None
        values = params.value if params.value is not None else torch.tensor(list(key.raw_token_ids()))
        namespace = adapter.namespace_of(key.extra_key, key.cache_salt)
        tokens = encode(key.raw_token_ids())
        end = (tokens.count - self._lookahead) // self.page_size * self.page_size
        tokens = tokens.part(0, end + self._lookahead)
        first = params.prev_prefix_len // self.page_size * self.page_size
        if end <= first:
            return InsertResult(prefix_len=0, last_device_node=self.root_node)
        before = self.books.match(tokens, namespace=namespace).walked
        gone = params.get_evicted_seqlen(ComponentType.SWA)
        if gone and self._has_windows:
            self.token_to_kv_pool_allocator.clear_full_to_swa_mapping(values[:gone])
        handed = self.slots.hand_in(values[first:end], True)
        assert handed is not None
        if self.states is not None and params.mamba_value is not None:
            handed |= {STATE: pages_of(params.mamba_value.tolist())}
        self.books.insert(tokens, handed, start=first, namespace=namespace, priority=params.priority)
        back = dict(self.books.take_back())
        kept = STATE in handed and STATE in back and set(back[STATE]) & set(handed[STATE].tolist())
        if kept:  # SGLang leaves it to the caller
            back[STATE] = [slot for slot in back[STATE] if slot not in kept]
        self._give_back(back)
        plan = self.books.match(tokens, namespace=namespace)
        self.slots.rejoin(handed, back, lambda: plan.pages(FULL)[first // self.page_size :])
        self._changed()
        return InsertResult(
            prefix_len=before, total_len=end, last_device_node=Node(self.books, plan, tokens), mamba_exist=bool(kept)
        )

    def root_node_handle(self, extra_key: str | None = None) -> Prefix:
        return self.root_node

    def __getattr__(self, name: str) -> Any:
        if name in self.of_its_tree:
            not_applicable(f"reads cache.{name}")
        raise AttributeError(name)


class MadeUpSlots(TokenSlots):
    """Slots for tests that hand in made-up ones: any numbers, the same ones twice, or pages that begin anywhere.

    The books get page numbers of ours, and a table says which slots stand for each.
    """

    def __init__(self, allocator: Any, page_size: int, tokens: int) -> None:
        self._allocator = allocator
        self.page_size = page_size
        self.device = torch.device("cpu")
        self.nothing = torch.empty(0, dtype=torch.int64)
        self._slots: dict[int, torch.Tensor] = {}
        self._free = list(range(tokens // page_size, 0, -1))

    def hand_in(self, row: torch.Tensor, finished: bool) -> Handed | None:
        parts = row.clone().split(self.page_size)
        pages = [self._free.pop() for _ in parts]
        self._slots |= dict(zip(pages, parts, strict=True))
        return {FULL: pages_of(pages)}

    def locations(self, pages: Sequence[int] | Pages) -> torch.Tensor:
        return torch.cat([self._slots[int(page)] for page in pages]).long() if len(pages) else self.nothing

    def give_back(self, back: Back) -> None:
        pages = pages_of(back.get(FULL, ())).tolist()
        if pages:
            slots = self.locations(pages)
            for page in pages:
                del self._slots[page]
            self._free += pages
            if self._allocator is not None:
                self._allocator.free_segment(slots, start_pos=0)


class OurRadixCache(OurTree):
    """Our cache where a test makes SGLang's cache of full attention alone, with or without pools."""

    def __init__(self, params: Any) -> None:
        params.tree_components = (ComponentType.FULL,)
        given, params.token_to_kv_pool_allocator = params.token_to_kv_pool_allocator, NoAllocator()
        super().__init__(params)
        self.token_to_kv_pool_allocator = given
        self.slots = MadeUpSlots(given, self.page_size, MADE_UP)

    def _books(self, params: Any) -> Any:
        config = {"model_type": "qwen3_next", "num_hidden_layers": 1, "layer_types": ["full_attention"], **LAYERS}
        pools = Pools(params.page_size, MADE_UP // params.page_size)
        return books_for(config, pools, bigrams=params.is_eagle, policy=params.eviction_policy.lower())

    create_simulated: ClassVar[Any]

    def total_size(self) -> int:  # type: ignore[override]
        """SGLang's class of full attention alone answers one number."""
        return super().total_size()[0]


class NoAllocator:
    device = torch.device("cpu")


def pytest_configure(config: Any) -> None:
    forward_sglang.forward()
    if os.environ.get("OURS_INSIDE") != "1":
        return
    theirs, simple = unified_radix_cache.UnifiedRadixCache, radix_cache.RadixCache
    OurTree.of_its_tree = (fields(theirs) | fields(simple)) - {*dir(BasePrefixCache)}
    simulated = simple.create_simulated.__func__
    OurRadixCache.create_simulated = classmethod(simulated)
    adapter.Prefix = Node  # type: ignore[misc]
    forward_sglang.tree(OurTree)
    unified_radix_cache.UnifiedRadixCache = OurTree
    radix_cache.RadixCache = OurRadixCache


def pytest_collect_file(file_path: Path, parent: Any) -> None:
    if file_path.suffix == ".py":
        forward_sglang.names(file_path)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Leave out what fails without our cache as well."""
    chosen = os.environ.get("OURS_ONLY")
    if chosen:
        ends = {".".join(name.rsplit(".", 2)[-2:]) for name in Path(chosen).read_text().splitlines()}
        items[:] = [item for item in items if f"{item.fspath.purebasename}.{item.parent.name}::{item.name}" in ends]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: Any) -> Any:
    """Write down how many caches of ours a test has made."""
    before = MADE
    try:
        return (yield)
    finally:
        item.user_properties.append(("ours", MADE - before))
