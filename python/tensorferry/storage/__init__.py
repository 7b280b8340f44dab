"""Containers: their entries, where they are written to and read from, and folders of them. Nothing imports torch."""
