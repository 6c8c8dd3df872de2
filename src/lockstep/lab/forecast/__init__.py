"""Predictions without running: the memory of a training step, and its speed on hypothetical devices.

The memory of a model is counted (``footprint``), the time of a step is measured (``project``) or modelled
(``roofline``), and the rest is pure arithmetic (``memory``, ``collectives``, ``scaling``).
"""
