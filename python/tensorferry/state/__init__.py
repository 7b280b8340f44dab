"""Converts a state_dict to a container and back: tree, manifest, pickle and tensors."""
