"""Tools for machines with a GPU: compile its kernels elsewhere, check them there."""
