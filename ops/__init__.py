"""Everything around the three processes: command line, supervisor, benchmarks, images."""
