"""Load generation and measurement: `triptych bench …`. Nothing here is imported by the serving processes."""
