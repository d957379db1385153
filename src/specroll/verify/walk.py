"""Follow the target's own draws through each tree. The only place that decides which nodes are kept.

The draws are made elsewhere, at every node, from the target's law and the noise of the node's own position: nothing
here can bend the law. A draw that disagrees with the tree ends the walk and is emitted as it is, never drawn again.
"""

from __future__ import annotations

from specroll.types import Draws, Tree, Verdict


def walk(tree: Tree, draws: Draws) -> Verdict:
    """Accept each node whose parent is accepted and drew its token; roots always.

    Needs siblings with distinct tokens (as `grow` makes them): then the accepted nodes of a sequence are one path.
    """
    # A node is accepted when it and all its ancestors agree; each step doubles the stretch that was looked at.
    accepted_N = (tree.depth_N == 0) | (tree.token_N == draws.token_N[tree.parent_N])
    jump_N = tree.parent_N
    for _ in range(tree.max_depth.bit_length()):
        accepted_N = accepted_N & accepted_N[jump_N]
        jump_N = jump_N[jump_N]
    return Verdict(draws=draws, accepted_N=accepted_N)
