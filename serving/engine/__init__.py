"""One thread that turns requests into full device steps."""
