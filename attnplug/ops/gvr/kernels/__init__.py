"""The kernels that are too long for the files of gvr's ops."""
