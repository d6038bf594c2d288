"""The five decisions as small strategy objects. Each module has one interface and its implementations."""
