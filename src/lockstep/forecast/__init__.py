"""Predicted, not tried: the memory of a training step, and its speed on devices that are not here.

What a model needs is counted (``ledger``, ``footprint``), what a step takes is measured or modelled (``step``), and
the rest is pure arithmetic (``memory``, ``collectives``, ``buckets``, ``scaling``).
"""
