"""The nodes of a run: their clients, their replies, and the messages between them and the server."""
