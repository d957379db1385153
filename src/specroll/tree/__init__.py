"""Token trees: which candidates a round verifies, and who is whose ancestor. Knows nothing of models or proposers."""

from specroll.tree.grow import Ranked, grow, rank, roots
from specroll.tree.mask import ancestors
from specroll.tree.paths import spell_out

__all__ = ["Ranked", "ancestors", "grow", "rank", "roots", "spell_out"]
