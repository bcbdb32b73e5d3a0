"""Training data: raw rows, token ids with a loss mask in a cache, batches by step.

`config` says what to read, `sources` and `stdlib` read it, `rows` gives every row one of three
shapes, `masking` makes tokens and masks, `dataset` keeps them in files, `batches` cuts and packs.
"""
