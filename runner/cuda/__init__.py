"""The runner on a GPU: what goes beyond what a CPU runner does. Nothing here is imported where there is none."""
