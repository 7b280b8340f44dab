"""The fault matrix: every fault against every transport, each combination in fresh processes."""
