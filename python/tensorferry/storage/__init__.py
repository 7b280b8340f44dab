"""Containers where they are kept. Nothing here imports torch."""
