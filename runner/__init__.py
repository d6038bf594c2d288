"""The model runner: weights, KV pages, kernels and sampling. It decides nothing about what runs."""
