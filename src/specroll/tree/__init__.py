"""Token trees: which candidates a round verifies, and who is whose ancestor. Knows nothing of models or proposers."""

from specroll.tree.grow import Grown, grow, roots
from specroll.tree.mask import ancestors

__all__ = ["Grown", "ancestors", "grow", "roots"]
