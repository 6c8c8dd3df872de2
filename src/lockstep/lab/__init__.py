"""Measure and predict: benchmarks, forecasts, the machine's check, reports. No training run needs them."""
