"""Reads pickles that come from outside the process, with an allow-list: a machine of its own, and what it may name."""
