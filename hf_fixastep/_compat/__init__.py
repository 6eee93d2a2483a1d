"""All that touches a private name of transformers, accelerate, datasets, huggingface_hub or torch.

Each entry says which version needs it, why, and when it can go. `tests/compat` holds a canary for each: a
test that fails with a clear sentence when the lines that we rely on change upstream.
"""
