"""The radix tree: keys, nodes and their places. It knows pages of key bytes and nothing of what hangs at a node.

A node's edge is a whole number of pages; a parent finds a child by the bytes of its first page, which are kept once:
the node has them and the rest of its edge apart. A split keeps the *lower* half's identity, so whoever holds a node
keeps holding the same boundary.
"""

from __future__ import annotations

from typing import Any


class Node:
    """One edge of the tree and the boundary at its end.

    ``end`` is in tokens from the root. ``first`` is the first page of the edge, empty once the node is unlinked;
    ``rest`` what follows it. ``cells[i]`` is what component i keeps here, or None. ``leases`` counts those anchored
    here, so that a boundary in use is not unlinked even when it holds nothing.
    """

    __slots__ = ("cells", "end", "first", "kids", "leases", "parent", "priority", "rest")

    parent: Node
    kids: dict[bytes, Node] | None
    cells: list[Any]

    def __init__(self, parent: Node | None, first: bytes, rest: bytes, end: int, width: int) -> None:
        self.parent = parent  # type: ignore[assignment]
        self.first = first
        self.rest = rest
        self.end = end
        self.kids = None
        self.cells = [None] * width
        self.leases = 0
        self.priority = 0

    def above(self, rest: bytes, end: int) -> Node:
        """The upper half of a split of this node: what is said of the whole holds true of it as well."""
        upper = type(self)(self.parent, self.first, rest, end, len(self.cells))
        upper.priority = self.priority
        return upper

    @property
    def key(self) -> bytes:
        """The whole edge; empty once the node is unlinked."""
        return self.first and self.first + self.rest

    @property
    def start(self) -> int:
        return self.parent.end if self.parent is not None else 0

    def __repr__(self) -> str:
        held = "".join("-" if cell is None else "x" for cell in self.cells)
        return f"<Node [{self.start}, {self.end}) {held} kids={len(self.kids or ())} leases={self.leases}>"


class CountedNode(Node):
    """A node of a tree with a tier: ``hits`` counts how often it was matched, where that decides about its copy;
    ``links`` says where the first pages of its edge lie in a store, as far as that was asked.
    """

    __slots__ = ("hits", "links")

    def __init__(self, parent: Node | None, first: bytes, rest: bytes, end: int, width: int) -> None:
        super().__init__(parent, first, rest, end, width)
        self.hits = 0
        self.links: list[bytes | None] | None = None

    def above(self, rest: bytes, end: int) -> CountedNode:
        upper = super().above(rest, end)
        assert isinstance(upper, CountedNode)
        upper.hits = self.hits
        if self.links is not None:
            pages = len(rest) // len(self.first) + 1
            upper.links, self.links = self.links[:pages], self.links[pages:]
        return upper


class Root(Node):
    """Where a namespace begins: boundary 0, which needs nothing. It lives while anything hangs or is anchored there."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: str, width: int) -> None:
        super().__init__(None, b"", b"", 0, width)
        self.namespace = namespace


class Tree:
    """Roots by namespace, and the moves that change the shape."""

    __slots__ = ("element_bytes", "kind", "nodes", "page", "page_bytes", "roots", "width")

    def __init__(self, page: int, element_bytes: int, width: int, kind: type[Node] = Node) -> None:
        self.kind = kind
        self.page = page
        self.element_bytes = element_bytes
        self.page_bytes = page * element_bytes
        self.width = width
        self.roots: dict[str, Root] = {}
        self.nodes = 0

    def walk(self, root: Node, key: bytes) -> tuple[Node, int, Node]:
        """The deepest boundary whose key agrees: (node, tokens), inside of the node's edge or at its end.

        And the deepest node whose whole path agrees.
        """
        node = root
        kids = node.kids
        at = 0
        size = self.page_bytes
        while kids:
            second = at + size
            child = kids.get(key[at:second])
            if child is None:
                break
            rest = child.rest
            if not key.startswith(rest, second):
                return child, (second + self.agreed(key, second, rest)) // self.element_bytes, node
            at = second + len(rest)
            node = child
            kids = child.kids
        return node, node.end, node

    def agreed(self, key: bytes | bytearray, at: int, rest: bytes) -> int:
        """Bytes of whole pages in which ``rest`` agrees with ``key`` from ``at``."""
        size = self.page_bytes
        low, high = 0, min(len(rest), len(key) - at) // size
        while low < high:
            middle = (low + high + 1) // 2
            if key.startswith(rest[low * size : middle * size], at + low * size):
                low = middle
            else:
                high = middle - 1
        return low * size

    def attach(self, parent: Node, key: bytes, end: int, at: int = 0) -> Node:
        """A new leaf under ``parent``, whose edge is ``key`` from byte ``at``."""
        second = at + self.page_bytes
        first = key[at:second]
        node = self.kind(parent, first, key[second:], end, self.width)
        kids = parent.kids
        if kids is None:
            parent.kids = {first: node}
        else:
            kids[first] = node
        self.nodes += 1
        return node

    def split(self, node: Node, boundary: int) -> Node:
        """Cut ``node``'s edge at ``boundary`` tokens; the new upper node is returned, ``node`` stays the lower half."""
        parent = node.parent
        cut = (boundary - parent.end) * self.element_bytes
        size = self.page_bytes
        rest = node.rest
        upper = node.above(rest[: cut - size], boundary)
        node.first = rest[cut - size : cut]
        node.rest = rest[cut:]
        node.parent = upper
        upper.kids = {node.first: node}
        parent.kids[upper.first] = upper  # type: ignore[index]
        self.nodes += 1
        return upper

    def prune(self, node: Node) -> bool:
        """Unlink ``node`` if it is bare (no kids, no cell, no lease), and then its ancestors as far as they are.

        True if a boundary was lost by it: plans may have led there.
        """
        width = self.width
        lost = False
        while not node.kids and not node.leases:
            parent = node.parent
            if parent is None:
                assert isinstance(node, Root)
                if self.roots.get(node.namespace) is node:
                    del self.roots[node.namespace]
                    unlink(node)  # a root and its cells know each other
                return lost
            kids = parent.kids
            if node.cells.count(None) != width or kids is None or kids.get(node.first) is not node:
                return lost
            del kids[node.first]
            if not kids:
                parent.kids = None
            node.first = b""
            self.nodes -= 1
            lost = True
            node = parent
        return lost

    def prune_all(self, nodes: list[Node]) -> None:
        """``prune`` for each of ``nodes``, quick where it is a leaf that lost its only cell."""
        width = self.width
        gone = 0
        for node in nodes:
            if node.kids or node.leases or (width > 1 and node.cells.count(None) != width):
                continue
            parent = node.parent
            kids = parent.kids
            if kids is None or kids.get(node.first) is not node:
                continue
            if len(kids) > 1:
                del kids[node.first]
            else:
                parent.kids = None
                if not parent.leases and (parent.parent is None or parent.cells.count(None) == width):
                    self.prune(parent)
            node.first = b""
            gone += 1
        self.nodes -= gone


def climb(node: Node, boundary: int) -> Node:
    """The node on the way up from ``node`` in whose edge, or at whose end, ``boundary`` lies."""
    while node.parent is not None and node.parent.end >= boundary:
        node = node.parent
    return node


def unlink(root: Node) -> None:
    """Cut the links of a tree that is given up, without recursion and without leaving cycles behind."""
    stack = [root]
    while stack:
        node = stack.pop()
        if node.kids:
            stack.extend(node.kids.values())
        node.kids = None
        for cell in node.cells:
            if cell is not None:
                cell.node = cell.prev = cell.next = None
        node.cells = []
