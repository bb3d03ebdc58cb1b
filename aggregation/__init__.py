"""The mathematics of updates on torch tensors, on any device.

No IO, no clocks, no hidden randomness: values in, values out.
"""
