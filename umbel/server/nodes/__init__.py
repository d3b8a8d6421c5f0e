"""Who is there and what they answered: nodes, their clients, and what travels between them and the server."""
