"""Container images: Dockerfiles and the small scripts they use."""
