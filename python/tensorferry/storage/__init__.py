"""Containers, the names of their entries, slices of them and where to read these, and folders. Nothing here imports torch."""
