"""Quantisation: training for the precision that is served (rules, fake-quant layers, folding)."""
