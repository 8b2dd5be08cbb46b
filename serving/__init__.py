"""The server: plain data, engine, pipeline, service, transport, offline scoring, command line."""
