"""Thin entry points: python -m scripts.<name>."""
