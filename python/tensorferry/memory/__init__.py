"""Memory of tensors: on the host, on an accelerator, and on the way between them."""
