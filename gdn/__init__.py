"""The target: a hybrid Gated DeltaNet / attention language model that can verify a draft tree.

Letters in shape annotations: B batch, T query time, S cache length, D model, F mlp, N query heads,
K kv heads, G query heads per kv head, H head dim, HK / HV DeltaNet key / value heads, DK / DV their
dims, E convolution channels, W convolution width, V vocabulary, L layers, C chunk, M tree nodes,
P nodes of an accepted path, A aux hidden states, R rotary pairs.
"""

from gdn.cache import Cache, commit, grow_cache, init_cache
from gdn.config import TargetConfig
from gdn.model import HybridLM
from gdn.ops.tree import Tree, chain_tree, tree_from_parents
from gdn.weights import load_pretrained, save_pretrained

__all__ = [
    "Cache",
    "HybridLM",
    "TargetConfig",
    "Tree",
    "chain_tree",
    "commit",
    "grow_cache",
    "init_cache",
    "load_pretrained",
    "save_pretrained",
    "tree_from_parents",
]
