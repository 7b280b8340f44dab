"""Checkpoints in object stores: places with URLs, requests to the stores, and saves into them."""
