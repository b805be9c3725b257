"""Fused attention kernels, each exact and tested against the reference in attention.py."""
