"""The decoder that Llama, Mistral, Qwen2, Qwen3 and SmolLM2 configure, and what it needs to know about itself."""
