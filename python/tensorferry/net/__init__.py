"""The network as users configure it and see it in the log. Nothing here imports torch."""
