"""The Hub: a bounded, hash-checked client, and the cards of what is pushed."""
