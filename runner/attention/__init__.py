"""Attention over a paged KV pool: the interface, a reference, and the CPU backends."""
