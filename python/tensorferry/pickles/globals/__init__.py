"""The globals that a pickle may name by default, and what a pickle may do with each of them."""
