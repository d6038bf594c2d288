"""Recorded traffic through the serving scheduler, on a virtual clock."""
