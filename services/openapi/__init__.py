"""What `GET /openapi.json` says: the routes, their bodies and answers. Ranges come from those who check them."""
