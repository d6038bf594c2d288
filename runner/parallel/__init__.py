"""One runner over several ranks: how they start, talk, agree and end. The model's split is in `runner.model.shard`."""
