"""A TCP proxy that stands between a receiver and its source and acts out a script of faults."""
