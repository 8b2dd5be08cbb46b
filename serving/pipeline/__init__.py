"""Stages before and after the engine: render, encode, decode, post-process."""
