"""Which peers may connect: authentication, TLS, and limits for connections that have proved nothing yet."""
