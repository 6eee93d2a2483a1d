"""What one step is made of: batch, forwards, mixing, gate, schedules, teacher. Plain torch, no Hugging Face
library.
"""
