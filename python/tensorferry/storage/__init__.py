"""Containers, the names of their entries, slices of them, and folders of them. No module here imports torch."""
