"""Checkpointers: the interface of torch's experimental ``Checkpointer``, and processes that write and keep states."""
