"""The kernels that are too long for the files of momo's ops."""
