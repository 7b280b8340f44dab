"""The keeper of a node: a process that holds staged snapshots in memory after their trainer is gone; torch-free."""
