"""One module per group of routes; `services.app` assembles them."""
