"""Admission, breakers, ladder: pure policies with an injected clock."""
