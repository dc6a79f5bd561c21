"""Triton kernels: pointers, sizes, strides and config in, nothing out. Importing this package imports Triton."""
