"""What runs inside another interpreter, which has vLLM: nothing here is imported by this project."""
