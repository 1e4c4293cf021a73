"""Attention kernels of accelerators, and the choice of one."""
