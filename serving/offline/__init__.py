"""`tidegate score`: the rows of a file through the same stages and the same engine as a request, without HTTP."""
