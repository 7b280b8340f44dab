"""The formats of checkpoints as bytes: Zarr arrays, and what a conversion reads from and writes to."""
