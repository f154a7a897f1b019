"""Radix tree: nodes and their keys. It knows pages of key bytes, and nothing of the cells at a node.

A node's edge is a whole number of pages. An only child is compared as a whole; among several, a parent finds one by the
bytes of its first page. Such a child keeps its first page apart from the rest of its edge. A split keeps the identity
of the *lower* half, so a reference to a node always stands for the same boundary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ..errors import InvariantError

FOREVER = math.inf
"""Until when a node is wanted if nobody said how long."""
NEVER = -math.inf
"""Until when a node is wanted that no sequence has used yet, once somebody said how long."""


class Node:
    """One edge of the tree, and the boundary at its end.

    ``end``     the boundary, in tokens from the root
    ``kids``    None, the only child, or children by their first page (a dictionary may be left with one child)
    ``first``   the page by which the parent finds the node, empty for an only child; None for a root, and for a node
                that was unlinked
    ``rest``    the edge after ``first``
    ``cells``   what each component keeps here, or None
    ``leases``  the number of leases that are anchored here: a boundary in use is not unlinked, even if it holds nothing
    ``priority``  the highest of the sequences that published here
    ``until``   when nobody wants any more what hangs here, nor anything below it (``expiries``)
    """

    __slots__ = ("cells", "end", "first", "kids", "leases", "parent", "priority", "rest", "until")

    parent: Node
    kids: Node | dict[bytes, Node] | None
    first: bytes | None
    cells: list[Any]

    def __init__(self, parent: Node | None, first: bytes | None, rest: bytes, end: int, width: int) -> None:
        self.parent = parent  # type: ignore[assignment]
        self.first = first
        self.rest = rest
        self.end = end
        self.kids = None
        self.cells = [None] * width
        self.leases = 0
        self.priority = 0
        self.until = FOREVER

    def above(self, rest: bytes, end: int, pages: int) -> Node:
        """Make the upper half of a split of this node, of so many pages, with the same properties as the whole."""
        assert self.first is not None
        upper = type(self)(self.parent, self.first, rest, end, len(self.cells))
        upper.priority = self.priority
        upper.until = self.until
        return upper

    @property
    def children(self) -> list[Node]:
        kids = self.kids
        if kids is None:
            return []
        return list(kids.values()) if isinstance(kids, dict) else [kids]

    @property
    def forks(self) -> bool:
        """Whether paths diverge here."""
        return isinstance(self.kids, dict) and len(self.kids) > 1

    @property
    def key(self) -> bytes:
        """The whole edge; empty once the node is unlinked."""
        return b"" if self.first is None else self.first + self.rest

    @property
    def start(self) -> int:
        return self.parent.end if self.parent is not None else 0

    @property
    def idle(self) -> bool:
        """Whether nothing hangs from the node and nothing protects it."""
        return self.kids is None and not self.leases

    @property
    def linked(self) -> bool:
        """Whether the tree still has the node."""
        return self.first is not None or self.parent is None

    def protect(self) -> None:
        """Keep the node linked, even if nothing is cached at it, until it is unprotected as often."""
        self.leases += 1

    def unprotect(self) -> bool:
        """Undo ``protect``. True if the node is to be pruned next, as it may be bare."""
        self.leases -= 1
        return not self.leases and self.kids is None

    def __repr__(self) -> str:
        held = "".join("-" if cell is None else "x" for cell in self.cells)
        return f"<Node [{self.start}, {self.end}) {held} kids={len(self.children)} leases={self.leases}>"


class Counted(Node):
    """A node of a tree with a tier.

    ``hits`` counts its matches, if copies depend on that. ``links`` are the links of the first pages of its edge, by
    which a store addresses them, as far as they are known.
    """

    __slots__ = ("hits", "links")

    def __init__(self, parent: Node | None, first: bytes | None, rest: bytes, end: int, width: int) -> None:
        super().__init__(parent, first, rest, end, width)
        self.hits = 0
        self.links: list[bytes] | None = None

    def above(self, rest: bytes, end: int, pages: int) -> Counted:
        upper = super().above(rest, end, pages)
        assert isinstance(upper, Counted)
        upper.hits = self.hits
        if self.links is not None:
            upper.links, self.links = self.links[:pages], self.links[pages:]
        return upper


class Root(Node):
    """The root of a namespace: boundary 0, which needs nothing. It lives while it has children or leases."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: str, width: int) -> None:
        super().__init__(None, None, b"", 0, width)
        self.namespace = namespace


class Tree:
    """The roots by namespace, and the operations that change the tree."""

    __slots__ = ("element_bytes", "kind", "nodes", "page", "page_bytes", "roots", "until", "width")

    def __init__(self, page: int, element_bytes: int, width: int, kind: type[Node] = Node) -> None:
        """Make a tree without roots, whose nodes have ``width`` cells."""
        self.kind = kind
        self.page = page
        self.element_bytes = element_bytes
        self.page_bytes = page * element_bytes
        self.width = width
        self.until = FOREVER
        """Until when a new leaf is wanted."""
        self.roots: dict[str, Root] = {}
        self.nodes = 0

    def root(self, namespace: str) -> Root:
        """Make an empty root, which is not one of ``roots`` yet."""
        return Root(namespace, self.width)

    def walk(self, root: Node, key: bytes) -> tuple[Node, int, Node]:
        """Find the deepest boundary whose key agrees: (node, tokens, the deepest node whose whole path agrees).

        The boundary lies inside of the first node's edge, or at its end.
        """
        node = root
        kids = node.kids
        at = 0
        inside = None
        while kids is not None:
            child, second = self.below(kids, key, at)
            if child is None:
                break
            if not key.startswith(child.rest, second):
                inside = child
                break
            node = child
            at = child.end * self.element_bytes
            kids = child.kids
        if inside is None:
            return node, node.end, node
        second += self.agreed(key, second, inside.rest)
        return (inside, second // self.element_bytes, node) if second > at else (node, node.end, node)

    def below(self, kids: Node | dict[bytes, Node], key: bytes, at: int) -> tuple[Node | None, int]:
        """Return the one of ``kids`` that may continue the key at byte ``at``, and where its ``rest`` begins."""
        if isinstance(kids, dict):
            second = at + self.page_bytes
            return kids.get(key[at:second]), second
        return kids, at

    def agreed(self, key: bytes | bytearray, at: int, rest: bytes) -> int:
        """Return the number of bytes, in whole pages, for which ``rest`` agrees with ``key`` from ``at``."""
        size = self.page_bytes
        if not key.startswith(rest[:size], at):
            return 0
        low, high = 0, min(len(rest), len(key) - at) // size
        while low < high:
            middle = (low + high + 1) // 2
            if key.startswith(rest[low * size : middle * size], at + low * size):
                low = middle
            else:
                high = middle - 1
        return low * size

    def extend(
        self, node: Node, key: bytes, end: int, run: list[Node], split: Callable[[Node, int], Node]
    ) -> Node | None:
        """Add to ``run`` the nodes below ``node`` that ``key`` leads to, down to ``end``.

        Where the key leaves an edge, ``split`` cuts it and returns the upper half. The last node may be a new leaf,
        which is returned.
        """
        start = node.end
        at = 0
        kids = node.kids
        while kids is not None:
            child, second = self.below(kids, key, at)
            if child is None:
                break
            rest = child.rest
            if key.startswith(rest, second):
                node = child
                at = second + len(rest)
            else:
                second += self.agreed(key, second, rest)
                if second == at:
                    break
                at = second
                node = split(child, start + at // self.element_bytes)
            run.append(node)
            kids = node.kids
        if at == len(key):
            return None
        leaf = self.attach(node, key, end, at)
        run.append(leaf)
        return leaf

    def attach(self, parent: Node, key: bytes, end: int, at: int = 0) -> Node:
        """Make a new leaf under ``parent``, whose edge is ``key`` from byte ``at``."""
        kids = parent.kids
        if isinstance(kids, Node):
            kids = self.tell_apart(parent, kids)
        second = at if kids is None else at + self.page_bytes
        first = key[at:second]
        node = self.kind(parent, first, key[second:], end, self.width)
        node.until = self.until
        if kids is None:
            parent.kids = node
        else:
            kids[first] = node
        self.nodes += 1
        return node

    def tell_apart(self, parent: Node, only: Node) -> dict[bytes, Node]:
        """Turn the only child of ``parent`` into a dictionary of children by their first pages."""
        edge = only.rest
        only.first = first = edge[: self.page_bytes]
        only.rest = edge[self.page_bytes :]
        parent.kids = kids = {first: only}
        return kids

    def split(self, node: Node, boundary: int) -> Node:
        """Cut ``node``'s edge at ``boundary`` tokens. Return the new upper node; ``node`` stays the lower half."""
        parent, first, rest = node.parent, node.first, node.rest
        assert first is not None
        pages = (boundary - parent.end) // self.page
        cut = pages * self.page_bytes - len(first)
        upper = node.above(rest[:cut], boundary, pages)
        if first:
            parent.kids[first] = upper  # type: ignore[index]
        else:
            parent.kids = upper
        upper.kids = node
        node.parent = upper
        node.first = b""
        node.rest = rest[cut:]
        self.nodes += 1
        return upper

    def prune(self, node: Node) -> bool:
        """Unlink ``node`` as ``prune_all`` does. Return whether a node was unlinked, to which a plan may lead."""
        if node.kids is not None or node.leases or (node.first is not None and node.cells.count(None) != self.width):
            return False
        return self.prune_all((node,)) > 0

    def prune_all(self, nodes: Iterable[Node]) -> int:
        """Unlink each bare node (without kids, cells and leases) and its bare ancestors; return how many."""
        lost = 0
        try:
            for node in nodes:
                while node.kids is None and not node.leases:
                    first = node.first
                    if first is None:
                        if node.parent is None:
                            self._drop(node)
                        break
                    if node.cells.count(None) != self.width:
                        break
                    parent = node.parent
                    node.first = None
                    lost += 1
                    if first:
                        kids: Any = parent.kids
                        del kids[first]
                        if kids:
                            break
                    parent.kids = None
                    node = parent
        finally:  # also after an interrupt
            self.nodes -= lost
        return lost

    def check(self, nodes: list[Node], leases: Mapping[Node, int]) -> None:
        """Raise an InvariantError if ``nodes``, all there are, are no tree. ``leases`` counts those that are live."""
        for node in nodes:
            kids = node.kids
            told_apart = isinstance(kids, dict)
            found = kids if isinstance(kids, dict) else {} if kids is None else {b"": kids}
            for first, kid in found.items():
                if kid.parent is not node:
                    raise InvariantError(f"{kid!r} does not know its parent")
                if kid.until > node.until:
                    raise InvariantError(f"{kid!r} is wanted longer than what it hangs from")
                if kid.first != first or len(first) != self.page_bytes * told_apart:
                    raise InvariantError(f"{kid!r} stands under the wrong first page")
                if not kid.key or len(kid.key) % self.page_bytes:
                    raise InvariantError(f"{kid!r} has an edge that is no whole pages")
                if kid.end != node.end + len(kid.key) // self.element_bytes:
                    raise InvariantError(f"{kid!r} ends at the wrong boundary")
            if node.end and node.idle and node.cells.count(None) == self.width:
                raise InvariantError(f"{node!r} is bare and was not unlinked")
            if any(cell is not None and cell.node is not node for cell in node.cells):
                raise InvariantError(f"a cell of {node!r} belongs to another node")
            if node.leases != leases.get(node, 0):
                raise InvariantError(f"{node!r} counts {node.leases} leases; {leases.get(node, 0)} are live")
        linked = sum(node.end > 0 for node in nodes)
        if linked != self.nodes:
            raise InvariantError(f"{self.nodes} nodes are counted, and there are {linked}")

    def _drop(self, root: Node) -> None:
        assert isinstance(root, Root)
        if self.roots.get(root.namespace) is root:
            del self.roots[root.namespace]
            unlink(root)  # a root and its cells form cycles


def climb(node: Node, boundary: int) -> Node:
    """Return the ancestor of ``node``, or ``node`` itself, in whose edge or at whose end ``boundary`` lies."""
    while node.parent is not None and node.parent.end >= boundary:
        node = node.parent
    return node


def prioritize(run: Iterable[Node], leaf: Node | None, priority: int) -> None:
    """Raise the nodes of ``run`` to ``priority``. A new ``leaf`` takes it, be it high or low."""
    for node in run:
        if priority > node.priority or node is leaf:
            node.priority = priority


def path_up(node: Node, start: int = 0) -> list[Node]:
    """Return the nodes from ``node`` upward that end past ``start``, the deepest first, without the root."""
    found = []
    while node.end > start:
        found.append(node)
        node = node.parent
    return found


def root_of(node: Node) -> Root:
    """Return the root of the namespace in which ``node`` lies."""
    root = climb(node, 0)
    assert isinstance(root, Root)
    return root


def path_key(node: Node) -> bytes:
    """Return the key of the path to the end of ``node``."""
    return b"".join([each.key for each in reversed(path_up(node))])


def descendants(root: Node) -> Iterator[Node]:
    """Yield all nodes below ``root``, each after its parent, without recursion."""
    stack = list(root.children)
    while stack:
        node = stack.pop()
        yield node
        stack += node.children


def unlink(root: Node) -> None:
    """Cut all links of a tree that is given up, so that no cycles remain. It does not recurse."""
    stack = [root]
    while stack:
        node = stack.pop()
        stack += node.children
        node.kids = None
        for cell in node.cells:
            if cell is not None:
                cell.node = cell.prev = cell.next = None
        node.cells = [None] * len(node.cells)
        node.first = None
