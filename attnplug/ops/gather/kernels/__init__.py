"""The kernels that are too long for the files of gather's ops."""
