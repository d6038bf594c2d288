"""Anthropic's Messages API: its bodies, and the way from them to a chat request and back."""
