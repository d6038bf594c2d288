"""The wire contract: the only package that the API service, the scheduler and the runner all import."""
