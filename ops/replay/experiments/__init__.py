"""Experiments on schedulers: a question, the replays that answer it, their plots; shown in `docs/experiments.md`."""
