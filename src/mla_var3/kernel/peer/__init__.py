"""Other people's implementations, wrapped: each is optional, and found (`lib.find`) when it is asked for."""
