"""The memory of tensors: on the host, on an accelerator, and the copies between the two."""
