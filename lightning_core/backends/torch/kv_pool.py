"""A cache of keys and values, looked up by tokens.

It has one radix tree per adapter, because the same tokens have other keys and values under another adapter. Each node is a
run of tokens with their keys and values; the path from the root to a node is a context. A prompt reuses its longest cached
prefix, and only the rest is computed. A node owns its tensors: splitting a node makes two views, evicting the lower one drops its
tensors and copies the upper one, which frees the memory of both, and there is no slot table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lightning_core.model.forest import common_prefix

TokenArray = NDArray[np.int64]


class Node:
    """A run of tokens below ``parent``.

    ``adapter``: the adapter it is computed with; None for the model without an adapter.
    ``keys`` and ``values`` are [layers, K, tokens, D], or None until they are computed. ``column`` is the first column of
    their copy in `Cascade`, or None without a copy; splitting a node updates it. ``admission`` is the number of the admission of rows
    that computes or copies it.
    """

    __slots__ = ("adapter", "admission", "children", "column", "keys", "last_used", "parent", "tokens", "values")

    def __init__(self, tokens: TokenArray, parent: Node | None, adapter: str | None = None) -> None:
        self.tokens = tokens
        self.parent = parent
        self.adapter = adapter if parent is None else parent.adapter
        self.children: dict[int, Node] = {}
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.column: int | None = None
        self.admission = 0
        self.last_used = 0

    def path(self) -> list[Node]:
        """The nodes from below the root to this one."""
        nodes: list[Node] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class KVPool:
    """Radix trees of at most ``capacity`` tokens; evicts least recently used leaves."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.tokens = 0
        self.evicted = 0
        self._roots: dict[str | None, Node] = {}
        self._clock = 0

    def extend(self, tokens: TokenArray, adapter: str | None = None) -> Node:
        """The node whose path is ``tokens``; missing runs are added without keys and values."""
        self._clock += 1
        if adapter not in self._roots:
            self._roots[adapter] = Node(np.empty(0, dtype=np.int64), None, adapter)
        node, done = self._roots[adapter], 0
        while done < len(tokens):
            child = node.children.get(int(tokens[done]))
            if child is None:
                new = Node(tokens[done:].copy(), node)
                node.children[int(tokens[done])] = new
                self.tokens += len(new.tokens)
                node, done = new, len(tokens)
            else:
                shared = common_prefix(child.tokens, tokens[done:])
                node = child if shared == len(child.tokens) else self._split(child, shared)
                done += shared
            node.last_used = self._clock
        return node

    def known(self, tokens: TokenArray, adapter: str | None = None) -> int:
        """The length of the longest computed prefix of ``tokens``."""
        node, done = self._roots.get(adapter), 0
        while node is not None and done < len(tokens):
            node = node.children.get(int(tokens[done]))
            if node is None or node.keys is None:
                break
            shared = common_prefix(node.tokens, tokens[done:])
            done += shared
            if shared < len(node.tokens):
                break
        return done

    def discard(self, end: Node) -> None:
        """Undo an `extend` that returned ``end``: remove the run that it added, if any."""
        if end.parent is not None and end.keys is None and not end.children and not end.admission:
            del end.parent.children[int(end.tokens[0])]
            self.tokens -= len(end.tokens)

    def insert(self, tokens: TokenArray, keys: Tensor, values: Tensor, adapter: str | None = None) -> None:
        """Cache the last n of ``tokens``, with ``keys`` and ``values`` [layers, K, n, D].

        Parts that are already cached are unchanged. If a token before the last n is not cached, nothing is added.
        """
        node = self.extend(tokens, adapter)
        start = len(tokens) - keys.shape[2]
        stop = len(tokens)
        missing: list[Node] = []
        for part in reversed(node.path()):
            if part.keys is None:
                missing.append(part)
                begin = stop - len(part.tokens)
                if begin >= start:
                    part.keys = keys[:, :, begin - start : stop - start].clone()
                    part.values = values[:, :, begin - start : stop - start].clone()
            stop -= len(part.tokens)
        if any(part.keys is None for part in missing):
            self.forget_uncomputed()

    def forget_uncomputed(self) -> None:
        """Drop every node without keys and values, and its subtree."""
        for node in list(self.nodes()):
            if node.keys is None and node.parent is not None:
                del node.parent.children[int(node.tokens[0])]
                self._drop(node)

    def evict(self) -> None:
        """Drop the least recently used leaves until at most ``capacity`` tokens are left."""
        gone: set[Node] = set()
        while self.tokens > self.capacity:
            leaves = [node for node in self.nodes() if not node.children and node.parent is not None]
            if not leaves:
                break
            for leaf in sorted(leaves, key=lambda node: node.last_used):
                if self.tokens <= self.capacity:
                    break
                assert leaf.parent is not None
                del leaf.parent.children[int(leaf.tokens[0])]
                self.tokens -= len(leaf.tokens)
                self.evicted += len(leaf.tokens)
                gone.add(leaf)
        for node in gone:
            _copy_views(node, gone)

    def forget(self, adapter: str | None) -> None:
        """Drop the tree of ``adapter``; to be called when its weights change."""
        if adapter in self._roots:
            self._drop(self._roots.pop(adapter))

    def clear(self) -> None:
        """Drop all trees."""
        for adapter in list(self._roots):
            self.forget(adapter)

    def _drop(self, top: Node) -> None:
        """Take the nodes of the subtree of ``top`` from their parents, and off `tokens`."""
        # Else parents and children refer to each other, and only the garbage collector frees them.
        for node in list(_subtree(top)):
            self.tokens -= len(node.tokens)
            node.parent = None

    def _split(self, node: Node, at: int) -> Node:
        """Move the first ``at`` tokens of ``node`` to a new parent node; returns the parent."""
        assert node.parent is not None
        upper = Node(node.tokens[:at], node.parent)
        upper.last_used = node.last_used
        upper.admission = node.admission
        upper.column = node.column
        if node.column is not None:
            node.column += at
        if node.keys is not None and node.values is not None:
            upper.keys, upper.values = node.keys[:, :, :at], node.values[:, :, :at]
            node.keys, node.values = node.keys[:, :, at:], node.values[:, :, at:]
        node.parent.children[int(node.tokens[0])] = upper
        node.tokens = node.tokens[at:]
        node.parent = upper
        upper.children[int(node.tokens[0])] = node
        return upper

    def nodes(self) -> Iterator[Node]:
        """All nodes except the roots."""
        return (node for root in self._roots.values() for node in _subtree(root) if node is not root)


def cached(nodes: Sequence[Node]) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of the nodes that are computed, each [layers, K, tokens, D]."""
    return [(node.keys, node.values) for node in nodes if node.keys is not None and node.values is not None]


def _copy_views(evicted: Node, gone: set[Node]) -> None:
    """Copy the tensors of the nodes above ``evicted`` that are views of its memory, except those that are ``gone`` too."""
    if evicted.keys is None:
        return
    memory, node = evicted.keys.untyped_storage().data_ptr(), evicted.parent
    while node is not None and node.keys is not None and node.values is not None:
        if node.keys.untyped_storage().data_ptr() != memory:
            return
        if node not in gone:
            node.keys, node.values = node.keys.clone(), node.values.clone()
        node = node.parent


def _subtree(node: Node) -> Iterator[Node]:
    stack = [node]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())
