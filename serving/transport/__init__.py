"""HTTP: schema, handlers, middleware. HTTP objects never leave this package."""
