"""For torchft: ``HTTPTransport``, and torchft 0.2.0's own format for peers that still run torchft's transport."""
