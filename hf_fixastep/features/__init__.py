"""Pretrained networks: embed images once, fit a probe, train heads on the cache, put the best head back."""
