"""The kernels that are too long for the files of sketch's ops, and what they share."""
