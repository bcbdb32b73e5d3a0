"""The method: EAGLE-3 drafts and speculative decoding (arXiv 2503.01840) over the target in `gdn`.

Present so far: run configuration, and plain greedy decoding, the baseline for every draft.
"""
