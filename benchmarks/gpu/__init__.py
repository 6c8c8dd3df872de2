"""Workloads of one GPU against a bare compiled loop and other trainers. See ``gpu_workloads.py``."""
