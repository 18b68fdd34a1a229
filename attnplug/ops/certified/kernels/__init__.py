"""The kernels that are too long for the files of certified's ops."""
