"""The door for torchft: ``HTTPTransport``, and torchft 0.2.0's own bytes for peers that still speak them."""
