"""A state_dict as a container, and a container as a state_dict: tree, manifest, pickle and tensors."""
