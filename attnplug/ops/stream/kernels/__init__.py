"""The kernels that are too long for the files of stream's ops."""
