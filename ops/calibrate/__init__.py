"""Learns what a running server's steps cost."""
