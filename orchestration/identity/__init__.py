"""Who asks: from a bearer token (API key or JWT) to the principal behind it. Transports bring the token and decide what is allowed."""
