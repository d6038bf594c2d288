"""Text in and out of token ids, as a pure library: no HTTP, no event loop, no threads of its own."""
