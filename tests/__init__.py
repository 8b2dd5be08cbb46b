"""The test suite; mirrors the tree."""
