"""Forecast, alerts, scaling: pure policies with an injected clock."""
