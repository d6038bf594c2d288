"""The scheduler: decides which request computes how many tokens in each step. Holds no text and no tensors."""
