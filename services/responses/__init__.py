"""OpenAI's Responses API: its bodies, the way to a chat request and back, and the answers that are kept."""
