"""The part of the contents of a rollout that some calls refer to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lightning_core.content.shared_content import References, SharedContent
from lightning_core.content.token_tree import TokenTree


def part_of(
    content: SharedContent, used: Iterable[References]
) -> tuple[SharedContent, Mapping[References, References]]:
    """What ``used`` refer to, and by each of them, the reference to it there. The index of conversations has further texts."""
    used = set(used)
    parents, contents, texts = content.conversations()
    branches = content.tokens.branches
    # What comes before another one has a smaller index.
    nodes, lengths = {0}, dict[int, int]()
    for one in used:
        node = max(one.messages, 0)
        while node not in nodes:
            nodes.add(node)
            node = parents[node]
        branch, stop = one.branch, one.prompt + one.output
        while branch >= 0:
            parent, start, _ = branches[branch]
            lengths[branch] = max(lengths.get(branch, 0), stop - start)
            branch, stop = parent, start
    node_at = {node: i for i, node in enumerate(sorted(nodes))}
    kept = {contents[node] for node in nodes - {0}} | {i for one in used for i in (one.response, one.tools) if i >= 0}
    text_at = {-1: -1} | {text: i for i, text in enumerate(sorted(kept))}
    branch_at = {-1: -1} | {branch: i for i, branch in enumerate(sorted(lengths))}
    tree = TokenTree(
        [(branch_at[branches[i][0]], branches[i][1], branches[i][2][: lengths[i]]) for i in sorted(lengths)]
    )
    part = SharedContent(
        tree,
        [texts[i] for i in sorted(kept)],
        [node_at[parents[node]] for node in node_at],
        [0, *(text_at[contents[node]] for node in list(node_at)[1:])],
    )
    return part, {
        one: one._replace(
            messages=node_at.get(one.messages, -1),
            response=text_at[one.response],
            tools=text_at[one.tools],
            branch=branch_at[one.branch],
        )
        for one in used
    }
