"""Tool calls and reasoning: what requests say about them, how models write them, and how they reach the client."""
