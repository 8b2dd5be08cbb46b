"""The wire: what clients send and get, one struct per shape, the OpenAPI document made from the same structs."""
